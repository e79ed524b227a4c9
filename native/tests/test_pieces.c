/* A cache of pieces: slots hold what the files hold, whatever is read, evicted, kept or fails. */
#include "shelf.h"

TEST(contents) {
    static const size_t limits[] = {0, 5000, 300000};
    EACH_IO(io) {
        for (size_t l = 0; l < COUNT(limits); l++) {
            AUTO_SHELF s = make_shelf(io, UM_PIECES_FREQUENT, 10, 2);
            AUTO_HOLDER *holder = make_holder(&s);
            fault_os_limit_read(limits[l]);
            for (int32_t id = 0; id < N_PIECES; id++) {
                ENSURE(&s, holder, id);
            }
            for (int32_t id = 0; id + 10 <= N_SMALL; id += 3) {
                ENSURE(&s, holder, id, id + 1, id + 2, id + 3, id + 4, id + 5, id + 6, id + 7,
                       id + 8, id + 9, id, id + 9);
            }
            ENSURE(&s, holder, N_SMALL, 0, N_SMALL + 1, 1, N_SMALL);
            fault_os_limit_read(0);
        }
    }
}
