/* The CPU's features, against those that the kernel lists. */
#include "fault_os.h"
#include "os/cpu_features.h"

TEST(features_are_those_that_the_kernel_lists) {
#if defined(__x86_64__)
    static const struct {
        const char *word;
        unsigned bit;
    } features[] = {{" f16c ", UM__F16C}, {" avx2 ", UM__AVX2}, {" avx512f ", UM__AVX512F}};
    FILE *file = fopen("/proc/cpuinfo", "r");
    SKIP_UNLESS(file != NULL, "/proc/cpuinfo cannot be read");
    char line[16384] = "";
    while (strncmp(line, "flags", 5) != 0 && fgets(line, sizeof line, file) != NULL) {
    }
    CHECK_EQ(fclose(file), 0);
    REQUIRE(strncmp(line, "flags", 5) == 0);
    line[strcspn(line, "\n")] = ' ';
    for (size_t i = 0; i < COUNT(features); i++) {
        CHECK_EQ(um__cpu_has(features[i].bit), strstr(line, features[i].word) != NULL);
    }
    CHECK(um__cpu_has(0));
    CHECK(!um__cpu_has(1U << 31));
#else
    test_skip("no code asks this machine for what it has");
#endif
}
