/* Where each page of a block is. */
#include "internal.h"
#include "os.h"
