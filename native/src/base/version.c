/* The version of the library: that of the header it was compiled with. */
#include "unimem.h"

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

const char *um_version(void) {
    return TEXT(UM_VERSION_MAJOR) "." TEXT(UM_VERSION_MINOR) "." TEXT(UM_VERSION_PATCH);
}
