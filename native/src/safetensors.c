/* Reads the header of a safetensors file. */
#include "internal.h"
#include "os.h"
