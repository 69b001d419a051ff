#include "routing/matching_rows.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace hybridindex {

void matching_rows(const RowMask& mask, const std::int64_t* probes, std::int64_t n, std::int64_t p, std::int64_t width,
                   std::int64_t* positions) {
    for (std::int64_t q = 0; q < n; ++q) {
        std::int64_t* at = positions + q * width;
        std::int64_t* const end = at + width;
        for (const std::int64_t* probe = probes + q * p; probe != probes + (q + 1) * p; ++probe) {
            const std::int64_t list = *probe;
            if (list == -1) continue;
            if (list < 0 || list >= mask.nlist)
                throw std::out_of_range("probe " + std::to_string(list) + "; expected -1.." + std::to_string(mask.nlist - 1));
            const std::int64_t begin = mask.first[list], stop = mask.first[list + 1];
            if (begin < 0 || stop < begin || stop > mask.n_bits)
                throw std::out_of_range("list " + std::to_string(list) + " leaves the mask");
            const bool fits = mask.each(list, 0, stop - begin, [&](std::int64_t row) {
                if (at == end) return false;
                *at++ = list << 32 | row;
                return true;
            });
            if (!fits) throw std::length_error("a query has more rows than there is room for");
        }
        std::fill(at, end, -1);
    }
}

}  // namespace hybridindex
