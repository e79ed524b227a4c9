/* unimem: the headers of model files, parsed out of bytes that are not trusted. A part of the
 * public C API, with the conventions of unimem.h; the comments are the manual.
 *
 * The parsers open no files: a caller hands them the first bytes of one, and more of them when they
 * ask (UM_E_FULL, err->asked). What they hand out are offsets in the file, inside of it.
 */
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

/* Offsets are from the first byte of the file; nothing is copied. */
typedef struct um_gguf_kv {
    uint64_t key_offset, key_nbytes;
    uint64_t
        value_offset; /* of a string: its first byte; of an array: its first element's first byte */
    uint64_t value_nbytes; /* of the value from value_offset on */
    uint64_t n_items;      /* 1, or the array's length */
    um_gguf_type type;
    um_gguf_type item_type; /* of an array; else UM_GGUF_TYPE_COUNT */
} um_gguf_kv;

typedef struct um_gguf_tensor {
    uint64_t name_offset, name_nbytes;
    uint64_t ne[UM_GGUF_MAX_DIMS]; /* ggml order: ne[0] is contiguous; 1 beyond n_dims */
    uint64_t offset, nbytes;       /* of the data, from the first byte of the file */
    uint32_t n_dims, type;         /* type: ggml's number */
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

/* What is known of a tensor type: ggml's name ("q8_0"), values and bytes of a block. */
typedef struct um_gguf_tensor_type {
    const char *name;
    uint32_t block_values, block_bytes;
} um_gguf_tensor_type;
/* NULL for a number that ggml 0.15 does not know. */
UM_API const um_gguf_tensor_type *um_gguf_type_of_tensor(uint32_t type);

/* Parses a header. bytes holds the first nbytes of a file of file_nbytes. When the header goes on
 * behind nbytes (and inside the file), the call fails with UM_E_FULL and err->asked is a length
 * that is worth trying next. errors: UM_E_FORMAT with the rule (err->what) and the byte offset;
 * UM_E_FULL; UM_E_NOMEM. Allocates two tables, which are a small multiple of nbytes. */
UM_API um_status um_gguf_parse(um_gguf *out, const void *bytes, size_t nbytes, uint64_t file_nbytes,
                               um_error *err);
UM_API void um_gguf_free(um_gguf *gguf);

/* ---- safetensors ---- */

/* The header of a safetensors file, as https://github.com/huggingface/safetensors has it: a length,
 * and that many bytes of JSON. Offsets are bytes of the file; texts are as they lie there, escapes
 * and all: um_safetensors_write_text resolves them. */
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

/* A header has less than 4 GiB. */
typedef struct um_safetensors_text {
    uint32_t offset, nbytes; /* between the quotes */
} um_safetensors_text;

typedef struct um_safetensors_kv {
    um_safetensors_text key, value;
} um_safetensors_kv;

/* A tensor with more has no array in NumPy. */
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

/* The type's name in a header, such as "BF16", and the bits of a value; NULL and 0 for an unknown
 * one. */
UM_API const char *um_safetensors_type_name(um_safetensors_type type);
UM_API unsigned um_safetensors_type_bits(um_safetensors_type type);

/* Parses the first nbytes of a file of file_nbytes. The bytes may go away afterwards, but for the
 * texts. A string's offset, in an error, is that of its quote. errors: UM_E_FULL (the header has
 * err->asked bytes, or its length, of which less than 8 bytes were given, is needed first),
 * UM_E_FORMAT (err has rule and offset), UM_E_NOMEM, UM_E_INVALID (nbytes > file_nbytes). */
UM_API um_status um_safetensors_parse(um_safetensors *out, const void *bytes, size_t nbytes,
                                      uint64_t file_nbytes, um_error *err);
/* Writes a text of the header as UTF-8, its escapes resolved; out has room for text.nbytes, which
 * is never too little. Returns the bytes written. */
UM_API size_t um_safetensors_write_text(const void *bytes, um_safetensors_text text, char *out);
UM_API void um_safetensors_free(um_safetensors *safetensors);

#ifdef __cplusplus
}
#endif
#endif
