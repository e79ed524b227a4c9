/* unimem: parsers of the headers of model files, whose bytes are not trusted. They have the
 * conventions of unimem.h.
 *
 * The parsers open no files. A caller passes the first bytes of a file, and more if a parser asks
 * for them (UM_HEADER_FULL, err->asked). All offsets that they return lie inside the file. */
#ifndef UNIMEM_FORMATS_H
#define UNIMEM_FORMATS_H

#include "unimem.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- gguf ---- */

#define UM_GGUF_MAX_DIMS 4

typedef enum um_gguf_type {
    UM_GGUF_UINT8 = 0,
    UM_GGUF_INT8,
    UM_GGUF_UINT16,
    UM_GGUF_INT16,
    UM_GGUF_UINT32,
    UM_GGUF_INT32,
    UM_GGUF_FLOAT32,
    UM_GGUF_BOOL,
    UM_GGUF_STRING,
    UM_GGUF_ARRAY,
    UM_GGUF_UINT64,
    UM_GGUF_INT64,
    UM_GGUF_FLOAT64,
    UM_GGUF_TYPE_COUNT
} um_gguf_type;

/* A key and its value. Offsets are from the first byte of the file; nothing is copied. */
typedef struct um_gguf_kv {
    uint64_t key_offset, key_nbytes;
    uint64_t value_offset; /* of a string: its first byte; of an array: its first element */
    uint64_t value_nbytes; /* of the value from value_offset on */
    uint64_t n_items;      /* 1, or the array's length */
    um_gguf_type type;
    um_gguf_type item_type; /* of an array; else UM_GGUF_TYPE_COUNT */
} um_gguf_kv;

typedef struct um_gguf_tensor {
    uint64_t name_offset, name_nbytes;
    uint64_t ne[UM_GGUF_MAX_DIMS]; /* ggml order: ne[0] is contiguous; 1 beyond n_dims */
    uint64_t offset, nbytes;       /* of the data, from the first byte of the file */
    uint32_t n_dims, type; /* type: ggml's number; if unknown, nbytes ends at the next tensor */
} um_gguf_tensor;

typedef struct um_gguf {
    uint32_t version; /* read, as all of these */
    uint64_t alignment;
    uint64_t header_nbytes; /* up to the last byte of the tensor table */
    uint64_t data_offset;
    uint64_t n_kv, n_tensors;
    um_gguf_kv *kv;
    um_gguf_tensor *tensors;
} um_gguf;

/* A tensor type of ggml. */
typedef struct um_gguf_tensor_type {
    const char *name; /* such as "q8_0" */
    uint32_t block_values, block_bytes;
} um_gguf_tensor_type;
/* Returns the type of a number; NULL for a number that ggml 0.26 does not know. */
UM_API const um_gguf_tensor_type *um_gguf_type_of_tensor(uint32_t type);

/* Parses the header in the first nbytes of a file of file_nbytes. It allocates two tables, a small
 * multiple of nbytes: call um_gguf_free.
 *
 *
 * - UM_E_INVALID: nbytes is above file_nbytes.
 * - UM_E_FULL, UM_HEADER_FULL: err->asked is a length worth trying next.
 * - UM_E_FORMAT: the header breaks a rule; err has the rule and the offset. UM_E_NOMEM. */
UM_API UM_CHECKED um_status um_gguf_parse(um_gguf *out, const void *bytes, size_t nbytes,
                                          uint64_t file_nbytes, um_error *err);
UM_API void um_gguf_free(um_gguf *gguf);

/* ---- safetensors ---- */

/* The header of a safetensors file, as https://github.com/huggingface/safetensors defines it: a
 * length, and that many bytes of JSON. Offsets are from the first byte of the file. Texts still
 * have their escapes: um_safetensors_write_text resolves them. */
typedef enum um_safetensors_type {
    UM_ST_BOOL = 0,
    UM_ST_F4,
    UM_ST_F6_E2M3,
    UM_ST_F6_E3M2,
    UM_ST_U8,
    UM_ST_I8,
    UM_ST_F8_E5M2,
    UM_ST_F8_E4M3,
    UM_ST_F8_E8M0,
    UM_ST_F8_E4M3FNUZ,
    UM_ST_F8_E5M2FNUZ,
    UM_ST_I16,
    UM_ST_U16,
    UM_ST_F16,
    UM_ST_BF16,
    UM_ST_I32,
    UM_ST_U32,
    UM_ST_F32,
    UM_ST_C64,
    UM_ST_F64,
    UM_ST_I64,
    UM_ST_U64,
    UM_ST_TYPE_COUNT
} um_safetensors_type;

/* A text of the header, which is shorter than 4 GiB. */
typedef struct um_safetensors_text {
    uint32_t offset, nbytes; /* between the quotes */
} um_safetensors_text;

typedef struct um_safetensors_kv {
    um_safetensors_text key, value;
} um_safetensors_kv;

/* NumPy has no array with more dimensions. */
#define UM_SAFETENSORS_MAX_DIMS 64

typedef struct um_safetensors_tensor {
    um_safetensors_text name;
    uint64_t offset, nbytes;    /* of the data, which may lie at any byte */
    uint32_t first_dim, n_dims; /* dims[first_dim] and those behind it; the last is contiguous */
    um_safetensors_type type;
    uint32_t place; /* of the value of "data_offsets" */
} um_safetensors_tensor;

typedef struct um_safetensors {
    uint64_t n_kv, n_tensors, n_dims;
    um_safetensors_kv *kv;          /* of "__metadata__", in the order of the file */
    um_safetensors_tensor *tensors; /* in the order of the header */
    uint64_t *dims;
    uint64_t header_nbytes; /* the length and the JSON: data begins here */
} um_safetensors;

/* Returns the name of a type in a header, such as "BF16"; NULL for an unknown type. */
UM_API const char *um_safetensors_type_name(um_safetensors_type type);
/* Returns the bits of a value of a type; 0 for an unknown type. */
UM_API unsigned um_safetensors_type_bits(um_safetensors_type type);

/* Parses the header in the first nbytes of a file of file_nbytes. After the call only texts need
 * the bytes. um_safetensors_free frees the tables.
 *
 *
 * - UM_E_INVALID: nbytes is above file_nbytes.
 * - UM_E_FULL, UM_HEADER_FULL: err->asked is the header's length, or 8 if nbytes is less than the 8
 *   bytes that hold the length.
 * - UM_E_FORMAT: the header breaks a rule; err has the rule and the offset, of a string that of its
 *   quote. UM_E_NOMEM. */
UM_API UM_CHECKED um_status um_safetensors_parse(um_safetensors *out, const void *bytes,
                                                 size_t nbytes, uint64_t file_nbytes,
                                                 um_error *err);
/* Writes a text of the header to out as UTF-8, with its escapes resolved. Returns the bytes
 * written, at most text.nbytes. */
UM_API size_t um_safetensors_write_text(const void *bytes, um_safetensors_text text, char *out);
UM_API void um_safetensors_free(um_safetensors *safetensors);

#ifdef __cplusplus
}
#endif
#endif
