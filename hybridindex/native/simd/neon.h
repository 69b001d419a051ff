// What NEON lacks.
#pragma once
#include <arm_neon.h>

#include <cstdint>

namespace hybridindex {
namespace {

// Bit i is set where lane i of the two is, which are all ones or zeros.
inline std::uint32_t mask_of(uint16x8_t low, uint16x8_t high) {
    const uint8x16_t lanes = vuzp1q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high));
    const uint8x16_t bits = vandq_u8(lanes, vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201)));
    return vaddv_u8(vget_low_u8(bits)) | static_cast<std::uint32_t>(vaddv_u8(vget_high_u8(bits))) << 8;
}

}  // namespace
}  // namespace hybridindex
