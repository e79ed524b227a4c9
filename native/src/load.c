/* Loading: ranges of files into memory, read by several threads. */
#include "internal.h"
#include "os.h"
