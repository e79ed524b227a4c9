/* NUMA: where the pages of a block may lie, and moving those that lie elsewhere. */
#include "internal.h"
#include "os.h"

#include <errno.h>
