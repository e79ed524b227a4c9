// unimem in C++17, on a page: blocks that unmap themselves, tapes, and std::pmr on a tape. Copy it.
#ifndef UNIMEM_HPP
#define UNIMEM_HPP

#include <cstddef>
#include <memory_resource>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include <unimem.h>

namespace unimem {

// A call that failed, with all that the library says of it.
class Error : public std::runtime_error {
  public:
    explicit Error(const um_error &found)
        : std::runtime_error(std::string(um_status_name(found.status)) + ": " + found.what),
          error(found) {}
    um_error error;
};

// Calls a function with somewhere to put the error, and throws that: check([&](um_error *err) {
// return um_block_warm(block.get(), 0, n, 1, nullptr, err); }).
template <class Call> void check(Call call) {
    um_error error;
    if (call(&error) != UM_OK) {
        throw Error(error);
    }
}

class Block {
  public:
    explicit Block(std::size_t nbytes, const um_block_options &options = {}) {
        check([&](um_error *err) { return um_block_map(&block_, nbytes, &options, err); });
    }
    Block(Block &&other) noexcept : block_(std::exchange(other.block_, um_block{})) {}
    Block &operator=(Block &&other) noexcept {
        std::swap(block_, other.block_);
        return *this;
    }
    ~Block() {
        // What cannot be unmapped stays in the ledger; a destructor has nobody to tell.
        um_status status = um_block_unmap(&block_, nullptr);
        static_cast<void>(status);
    }
    std::byte *data() const { return static_cast<std::byte *>(block_.base); }
    std::size_t size() const { return block_.nbytes; }
    um_block *get() { return &block_; }

  private:
    um_block block_{};
};

// Memory of a block, taken in order and given back all at once. Objects on it are not destroyed.
class Tape {
  public:
    explicit Tape(Block &block) {
        check([&](um_error *err) { return um_tape_init(&tape_, block.data(), block.size(), err); });
    }
    Tape(const Tape &) = delete;
    Tape &operator=(const Tape &) = delete;
    // Uninitialised memory for n values; throws Error.
    template <class T> T *take(std::size_t n) {
        void *taken;
        if (n > static_cast<std::size_t>(-1) / sizeof(T)) {
            throw std::bad_array_new_length();
        }
        check([&](um_error *err) {
            return um_tape_take(&tape_, n * sizeof(T), alignof(T), &taken, err);
        });
        return static_cast<T *>(taken);
    }
    void clear() { um_tape_clear(&tape_); }
    std::size_t used() const { return um_tape_used(&tape_); }
    um_tape *get() { return &tape_; }

  private:
    um_tape tape_;
};

// Memory for containers of std::pmr. Deallocated memory stays taken until the tape is cleared,
// which must be after the end of the containers. A full tape throws std::bad_alloc.
class TapeResource : public std::pmr::memory_resource {
  public:
    explicit TapeResource(Tape &tape) : tape_(&tape) {}

  private:
    void *do_allocate(std::size_t nbytes, std::size_t align) override {
        void *taken;
        if (um_tape_take(tape_->get(), nbytes, align, &taken, nullptr) != UM_OK) {
            throw std::bad_alloc();
        }
        return taken;
    }
    void do_deallocate(void *, std::size_t, std::size_t) override {}
    bool do_is_equal(const std::pmr::memory_resource &other) const noexcept override {
        return this == &other;
    }
    Tape *tape_;
};

} // namespace unimem

#endif
