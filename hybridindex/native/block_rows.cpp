#include "block_rows.h"

#include <cstddef>
#include <cstring>

namespace hybridindex {

void decode_row(const BlockKernels& kernels, const RowCodes& codes, const std::uint8_t* code, const float* centroid,
                float* row) {
    switch (codes.code) {
        case Code::f32: std::memcpy(row, code, static_cast<std::size_t>(codes.dim) * 4); break;
        case Code::f16: kernels.decode_f16(code, codes.dim, row); break;
        case Code::bf16: kernels.decode_bf16(code, codes.dim, row); break;
        case Code::u8: kernels.decode_u8(code, codes.scale, codes.offset, codes.dim, row); break;
    }
    if (centroid != nullptr)
        for (std::int64_t i = 0; i < codes.dim; ++i) row[i] += centroid[i];
    for (std::int64_t i = codes.dim; i < padded_dim(codes.dim); ++i) row[i] = 0;
}

}  // namespace hybridindex
