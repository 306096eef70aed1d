// Matrices into the panels of tile.h and int8.h: the same for every instruction set but for the number of lanes.
#include <stdint.h>
#include <string.h>

namespace {

// from [outputs, inputs] -> panels of two vectors of `lanes` outputs, the last of one if need be; `together` consecutive
// inputs of an output lie side by side. `to` has been zeroed.
template <class T>
void pack(const T* from, int64_t outputs, int64_t inputs, int64_t lanes, int64_t together, T* to) {
    int64_t depth = (inputs + together - 1) / together, vectors = (outputs + lanes - 1) / lanes;
    for (int64_t n = 0; n < outputs; ++n) {
        int64_t vector = n / lanes, panel = vector / 2, width = panel * 2 + 1 < vectors ? 2 : 1;
        T* at = to + (panel * 2 * depth + vector % 2) * lanes * together + n % lanes * together;
        const T* row = from + n * inputs;
        int64_t step = width * lanes * together;
        if (together == 1)
            for (int64_t k = 0; k < inputs; ++k, at += step) *at = row[k];
        else
            for (int64_t k = 0; k < inputs; k += 2, at += step)
                for (int64_t i = 0; i < 2 && k + i < inputs; ++i) at[i] = row[k + i];
    }
}

}  // namespace

// `bytes` is the size of an element.
extern "C" __attribute__((visibility("default"))) void pg_pack(const void* from, int64_t bytes, int64_t outputs,
                                                               int64_t inputs, int64_t lanes, int64_t together,
                                                               void* to) {
    if (bytes == 1)
        pack(static_cast<const uint8_t*>(from), outputs, inputs, lanes, together, static_cast<uint8_t*>(to));
    else if (bytes == 2)
        pack(static_cast<const uint16_t*>(from), outputs, inputs, lanes, together, static_cast<uint16_t*>(to));
    else
        pack(static_cast<const uint32_t*>(from), outputs, inputs, lanes, together, static_cast<uint32_t*>(to));
}
