// How the stored bytes of a vector turn into floats.
#pragma once
#include <cstdint>

namespace hybridindex {

enum class Code { f32, f16, bf16, u8 };

// A row is code_size bytes, dim elements.
struct RowCodes {
    Code code;
    std::int64_t code_size;
    std::int64_t dim;
    const float* scale;   // (dim), u8 only: value = offset + scale * byte
    const float* offset;  // (dim), u8 only
};

constexpr std::int64_t element_size(Code code) { return code == Code::f32 ? 4 : code == Code::u8 ? 1 : 2; }

}  // namespace hybridindex
