/* Runs a fuzz target on the files of folders, without a fuzzer: `replay_gguf FOLDER...`. A target
 * that fails aborts, after the name of the file was printed. A folder without files is an error. */
#include <dirent.h>
#include <errno.h>

#include "fuzz.h"

static uint8_t *read_file(const char *path, size_t *out_nbytes) {
    FILE *file = fopen(path, "rb");
    if (file == NULL || fseek(file, 0, SEEK_END) != 0) {
        fprintf(stderr, "%s: %s\n", path, strerror(errno));
        exit(1);
    }
    size_t nbytes = (size_t)ftell(file);
    uint8_t *bytes = malloc(nbytes);
    rewind(file);
    if (bytes == NULL || fread(bytes, 1, nbytes, file) != nbytes) {
        fprintf(stderr, "%s: cannot be read\n", path);
        exit(1);
    }
    fclose(file);
    *out_nbytes = nbytes;
    return bytes;
}

static unsigned run_folder(const char *folder) {
    DIR *entries = opendir(folder);
    if (entries == NULL) {
        fprintf(stderr, "%s: %s\n", folder, strerror(errno));
        exit(1);
    }
    unsigned n = 0;
    for (struct dirent *entry; (entry = readdir(entries)) != NULL;) {
        char path[4096];
        if (entry->d_name[0] == '.') {
            continue;
        }
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        printf("%s\n", path);
        fflush(stdout);
        size_t nbytes;
        uint8_t *bytes = read_file(path, &nbytes);
        LLVMFuzzerTestOneInput(bytes, nbytes);
        free(bytes);
        n++;
    }
    closedir(entries);
    return n;
}

int main(int argc, char **argv) {
    unsigned n = 0;
    for (int i = 1; i < argc; i++) {
        n += run_folder(argv[i]);
    }
    printf("%u inputs\n", n);
    return n == 0;
}
