// Calls all functions of an allocator at random, more than half of them for 64 KiB or more, and
// looks at what the memory holds: family CALLS [SEED]. Prints how many were made, how many of them
// had memory that large, and how many of those at a multiple of 2 MiB, as placed memory is.
#include <malloc.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

extern "C" { // jemalloc's, where it is
void *mallocx(size_t, int) __attribute__((weak));
void *rallocx(void *, size_t, int) __attribute__((weak));
size_t xallocx(void *, size_t, size_t, int) __attribute__((weak));
size_t sallocx(const void *, int) __attribute__((weak));
void dallocx(void *, int) __attribute__((weak));
void sdallocx(void *, size_t, int) __attribute__((weak));
size_t nallocx(size_t, int) __attribute__((weak));
}

namespace {

constexpr size_t LARGE = 64 << 10, N_SLOTS = 48;
// How memory was allocated, where that says how it has to be freed.
enum kind { PLAIN, NEW, NEW_ARRAY, NEW_ALIGNED, NEW_ALIGNED_ARRAY };

struct slot {
    unsigned char *at;
    size_t nbytes, align;
    kind how;
    unsigned char mark;
};

uint64_t state = 1;
unsigned long n_large, n_placed;

uint64_t any(uint64_t n) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state % n;
}

size_t any_size() {
    return any(3) == 0 ? 16 + any(LARGE - 16) : LARGE + any(3 * LARGE);
}

[[noreturn]] void fail(const char *what) {
    std::fprintf(stderr, "wrong: %s\n", what);
    std::exit(1);
}

void expect(bool good, const char *what) {
    if (!good) {
        fail(what);
    }
}

void put_marks(const slot &own) {
    for (size_t at = 0; at < own.nbytes; at += 16381) {
        own.at[at] = own.mark;
    }
    own.at[own.nbytes - 1] = own.mark;
}

void look(const slot &own, size_t nbytes) {
    for (size_t at = 0; at < nbytes; at += 16381) {
        expect(own.at[at] == own.mark, "contents were lost");
    }
}

void *take(slot &own) {
    size_t n = own.nbytes;
    std::align_val_t align{own.align};
    void *aligned = nullptr;
    switch (any(mallocx != nullptr ? 16 : 15)) {
    case 0:
        own.how = NEW;
        return ::operator new(n);
    case 1:
        own.how = NEW_ARRAY;
        return ::operator new[](n, std::nothrow);
    case 2:
        own.how = NEW_ALIGNED;
        return any(2) == 0 ? ::operator new(n, align) : ::operator new(n, align, std::nothrow);
    case 3:
        own.how = NEW_ALIGNED_ARRAY;
        return ::operator new[](n, align);
    case 4:
        expect(posix_memalign(&aligned, own.align, n) == 0, "posix_memalign");
        return aligned;
    case 5:
        return memalign(own.align, n);
    case 6:
        own.nbytes = n = (n / own.align + 2) * own.align;
        aligned = aligned_alloc(own.align, n);
        own.align = mallocx == nullptr ? 16 : own.align; // mimalloc 2.0 misaligns some
        return aligned;
    case 7:
        own.align = 4096;
        return valloc(n);
    case 8: // jemalloc lacks it, and could not free the C library's
        own.align = 4096;
        return mallocx == nullptr ? pvalloc(n) : valloc(n);
    case 9: {
        own.align = 16;
        auto *zeroed = static_cast<unsigned char *>(calloc(1, n));
        expect(zeroed != nullptr && zeroed[0] == 0 && zeroed[n / 2] == 0 && zeroed[n - 1] == 0,
               "calloc is not zeroed");
        return zeroed;
    }
    case 10:
        own.align = 16;
        return reallocarray(nullptr, 1, n);
    case 15:
        expect(nallocx(n, __builtin_ctzl(own.align)) >= n, "nallocx");
        return mallocx(n, __builtin_ctzl(own.align)); // MALLOCX_LG_ALIGN
    default:
        own.align = 16;
        return malloc(n);
    }
}

void give(slot &own) {
    std::align_val_t align{own.align};
    bool sized = any(2) == 0;
    switch (own.how) {
    case NEW:
        sized ? ::operator delete(own.at, own.nbytes) : ::operator delete(own.at);
        break;
    case NEW_ARRAY:
        sized ? ::operator delete[](own.at, own.nbytes) : ::operator delete[](own.at);
        break;
    case NEW_ALIGNED:
        sized ? ::operator delete(own.at, own.nbytes, align) : ::operator delete(own.at, align);
        break;
    case NEW_ALIGNED_ARRAY:
        sized ? ::operator delete[](own.at, own.nbytes, align) : ::operator delete[](own.at, align);
        break;
    default:
        if (mallocx != nullptr && any(2) == 0) {
            expect(sallocx(own.at, 0) >= own.nbytes, "sallocx");
            own.align <= 16 && sized ? dallocx(own.at, 0)
                                     : sdallocx(own.at, own.nbytes, __builtin_ctzl(own.align));
        } else {
            free(own.at);
        }
    }
    own.at = nullptr;
}

void resize(slot &own) {
    size_t was = own.nbytes, nbytes = any_size();
    if (mallocx != nullptr && any(3) == 0) {
        size_t usable = xallocx(own.at, nbytes, 0, 0);
        expect(usable == malloc_usable_size(own.at), "xallocx");
        own.nbytes = usable;
    } else if (mallocx != nullptr && any(2) == 0) {
        own.at = static_cast<unsigned char *>(rallocx(own.at, nbytes, 0));
        own.nbytes = nbytes;
    } else {
        own.at = static_cast<unsigned char *>(any(2) == 0 ? realloc(own.at, nbytes)
                                                          : reallocarray(own.at, 1, nbytes));
        own.nbytes = nbytes;
    }
    own.align = 16;
    expect(own.at != nullptr, "realloc");
    look(own, was < own.nbytes ? was : own.nbytes);
    put_marks(own);
}

void count(const slot &own) {
    n_large += own.nbytes >= LARGE;
    n_placed += own.nbytes >= LARGE && reinterpret_cast<uintptr_t>(own.at) % (2 << 20) == 0;
}

void call(slot &own) {
    if (own.at != nullptr) {
        look(own, own.nbytes);
        count(own);
        if (own.how == PLAIN && any(2) == 0) {
            resize(own);
        } else {
            give(own);
        }
    } else {
        own = {nullptr, any_size(), size_t{16} << any(9), PLAIN,
               static_cast<unsigned char>(any(256))};
        own.at = static_cast<unsigned char *>(take(own));
        expect(own.at != nullptr && reinterpret_cast<uintptr_t>(own.at) % 16 == 0, "no memory");
        expect(own.how == NEW || own.how == NEW_ARRAY ||
                   reinterpret_cast<uintptr_t>(own.at) % own.align == 0,
               "alignment");
        expect(malloc_usable_size(own.at) >= own.nbytes, "malloc_usable_size");
        put_marks(own);
        count(own);
    }
}

} // namespace

int main(int n, char **words) {
    static slot slots[N_SLOTS];
    unsigned long n_calls = n > 1 ? std::strtoul(words[1], nullptr, 10) : 0;
    state = n > 2 ? std::strtoul(words[2], nullptr, 10) * 0x9e3779b97f4a7c15U : state;
    for (unsigned long i = 0; i < n_calls; i++) {
        call(slots[any(N_SLOTS)]);
    }
    for (slot &each : slots) {
        if (each.at != nullptr) {
            give(each);
        }
    }
    std::printf("%lu %lu %lu\n", n_calls, n_large, n_placed);
    return 0;
}
