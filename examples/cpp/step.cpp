// Steps of an engine in C++: what a step makes lies on a tape, in containers of the library.
#include <cstdio>
#include <memory_resource>
#include <string>
#include <vector>

#include "unimem.hpp"

// Sums what a tape holds. No allocator is called: a vector that grows takes from the tape.
static float step(unimem::Tape &tape, int token) {
    unimem::TapeResource scratch(tape);
    std::pmr::vector<float> hidden(&scratch);
    std::pmr::string name("a name that is too long to lie in the string itself", &scratch);
    for (int i = 0; i < 1000; i++) {
        hidden.push_back(static_cast<float>(token));
    }
    float sum = 0;
    for (float x : hidden) {
        sum += x;
    }
    return sum + static_cast<float>(name.size());
}

int main() {
    try {
        um_block_options options{};
        options.category = UM_CAT_SCRATCH;
        unimem::Block block(1 << 20, options);
        unimem::check([&](um_error *err) {
            return um_block_warm(block.get(), 0, block.size(), 1, nullptr, err);
        });
        unimem::Tape tape(block);
        std::size_t used = 0;
        float sum = 0;
        for (int token = 0; token < 100; token++) {
            sum += step(tape, token);
            used = tape.used();
            tape.clear(); // the containers are gone
        }
        std::printf("sum %.0f, %zu bytes a step\n", static_cast<double>(sum), used);
        float *all = tape.take<float>(block.size() / sizeof(float));
        std::printf("%d\n", static_cast<void *>(all) == block.data());
        unimem::TapeResource full(tape);
        try {
            std::pmr::vector<char> more(1, 'x', &full);
        } catch (const std::bad_alloc &) {
            std::puts("full");
        }
        tape.take<double>(1);
    } catch (const unimem::Error &error) {
        std::printf("%s, %llu of %llu bytes used\n", error.what(),
                    static_cast<unsigned long long>(error.error.used),
                    static_cast<unsigned long long>(error.error.limit));
        return error.error.status == UM_E_FULL ? 0 : 1;
    }
    return 1;
}
