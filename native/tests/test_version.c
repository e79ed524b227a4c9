/* The version: the library's, which is the project's, is the one of the header. */
#include <stdio.h>
#include <string.h>

#include "test.h"
#include "unimem.h"

int main(void) {
    char header[64];
    snprintf(header, sizeof header, "%d.%d.%d", UM_VERSION_MAJOR, UM_VERSION_MINOR,
             UM_VERSION_PATCH);
    CHECK(strcmp(um_version(), header) == 0);
    return test_report();
}
