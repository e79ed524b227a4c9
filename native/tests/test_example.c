/* The example of unimem.h is the one in this file, and it runs. */
#include "test.h"
#include "unimem.h"

/* clang-format off */
static um_status append_token(um_tape *tape, um_error *err) {
    um_kv_spec spec = {.n_layers = 1, .n_kv_heads = 2, .head_dim = 4, .batch = 1,
                       .max_seq_len = 16, .type = UM_F16, .v_type = UM_F16};
    um_kv_storage storage = {.n_rows = 16, .usable_rows = 16};
    float k[8] = {1}, v[8] = {2};
    size_t nbytes;
    um_kv kv;
    um_status status = um_kv_storage_bytes(&spec, &nbytes, err);
    if (status == UM_OK) {
        storage.lane_stride = storage.v_lane_stride = nbytes / 2; // a lane each
        status = um_tape_take(tape, nbytes, 64, &storage.base, err);
    }
    if (status == UM_OK) {
        status = um_kv_init(&kv, &spec, &storage, err);
    }
    if (status == UM_OK) {
        status = um_kv_append(&kv, 0, k, v, UM_F32, UM_KV_TOKEN_MAJOR, 1, err);
        um_kv_free(&kv);
    }
    return status;
}

static int run_example(void) {
    um_block_options options = {.category = UM_CAT_HISTORY};
    um_error err;
    um_block block;
    um_tape tape;
    um_status status = um_block_map(&block, 1 << 20, &options, &err);
    if (status == UM_OK) {
        status = um_tape_init(&tape, block.base, block.nbytes, &err);
        if (status == UM_OK) {
            status = append_token(&tape, &err);
        }
        um_status unmapped = um_block_unmap(&block, status == UM_OK ? &err : NULL);
        status = status == UM_OK ? unmapped : status; // the first failure counts
    }
    if (status != UM_OK) {
        fprintf(stderr, "%s: %s\n", um_status_name(err.status), err.what);
    }
    return status != UM_OK;
}

/* clang-format on */

enum { MAX_BYTES = 1 << 20 };

static void read_text(const char *path, char *out) {
    FILE *file = fopen(path, "r");
    REQUIRE(file != NULL);
    size_t nbytes = fread(out, 1, MAX_BYTES, file);
    REQUIRE(nbytes < MAX_BYTES);
    out[nbytes] = '\0';
    fclose(file);
}

/* Copies the lines of the header's example to out, without what begins a line of the comment. */
static void extract_example(const char *header, char *out) {
    static const char begin[] = " * Example\n *\n", margin[] = " *     ";
    const char *line = strstr(header, begin);
    REQUIRE(line != NULL);
    line += strlen(begin);
    while (*line != '\0' && strncmp(line, " * C", 4) != 0) {
        size_t nbytes = strcspn(line, "\n") + 1;
        size_t skipped = strncmp(line, margin, strlen(margin)) == 0 ? strlen(margin) : nbytes - 1;
        memcpy(out, line + skipped, nbytes - skipped);
        out += nbytes - skipped;
        line += nbytes;
    }
    *out = '\0';
}

TEST(text) {
    static char header[MAX_BYTES], source[MAX_BYTES], example[MAX_BYTES];
    read_text(UNIMEM_HEADER, header);
    read_text(__FILE__, source);
    extract_example(header, example);
    CHECK(strlen(example) > 1000);
    CHECK(strstr(source, example) != NULL);
}

TEST(run) {
    um_ledger_row row;
    CHECK_EQ(run_example(), 0);
    CHECK_OK(um_ledger_read(UM_CAT_HISTORY, &row, &test_err));
    CHECK_EQ(row.n_mappings, 0);
    CHECK(row.high_water_bytes >= 1 << 20);
}
