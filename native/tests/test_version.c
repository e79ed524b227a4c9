/* The version: the text is that of the numbers. */
#include "test.h"

TEST(version) {
    char header[64];
    snprintf(header, sizeof header, "%d.%d.%d", UM_VERSION_MAJOR, UM_VERSION_MINOR,
             UM_VERSION_PATCH);
    CHECK_STR(um_version(), header);
}
