/* The version of the library. CMake hands over the project's. */
#include "unimem.h"

const char *um_version(void) {
    return UM_PROJECT_VERSION;
}
