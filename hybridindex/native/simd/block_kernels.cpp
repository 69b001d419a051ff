#include "simd/block_kernels.h"

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace hybridindex {
namespace {

#if defined(__x86_64__)
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}

// By hand: compilers learnt the names late. Linux hands the tile registers to processes that ask.
bool has_amx() {
#if defined(__linux__)
    constexpr unsigned kTile = 1u << 24, kInt8 = 1u << 25, kHalves = 1u << 22, kVectorHalves = 1u << 5;
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    unsigned a, b, c, d;
    return has_avx512() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kTile) && (d & kInt8) &&
           (d & kHalves) && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & kVectorHalves) &&
           syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}
#else
bool has_avx2() { return false; }
bool has_avx512() { return false; }
bool has_amx() { return false; }
#endif

bool has_neon() {
#if defined(__aarch64__)
    return (getauxval(AT_HWCAP) & HWCAP_ASIMD) != 0;
#else
    return false;
#endif
}

}  // namespace

const BlockKernels* kernels_named(const char* name) {
    static const bool amx = has_amx(), avx512 = has_avx512(), avx2 = has_avx2(), neon = has_neon();
    // On 64-bit Arm the portable ones are compiled to NEON. The name tells codes and product quantizers to use theirs.
    static const BlockKernels neon_kernels = [] {
        BlockKernels named = *portable_kernels;
        named.name = "neon";
        return named;
    }();
    const BlockKernels* const all[] = {amx ? amx_kernels : nullptr, avx512 ? avx512_kernels : nullptr,
                                       avx2 ? avx2_kernels : nullptr, neon ? &neon_kernels : nullptr, portable_kernels};
    for (const BlockKernels* kernels : all)
        if (kernels != nullptr && (name == nullptr || std::strcmp(kernels->name, name) == 0)) return kernels;
    return nullptr;
}

void interleave(const std::uint8_t* const* rows, int n, std::int64_t row_bytes, std::uint8_t* out) {
    for (std::int64_t i = 0; i < row_bytes; i += 4, out += 4 * kBlockRows) {
        for (int r = 0; r < n; ++r) std::memcpy(out + 4 * r, rows[r] + i, 4);
        std::memset(out + 4 * n, 0, static_cast<std::size_t>(4 * (kBlockRows - n)));
    }
}

bool streams_by_itself() {
#if defined(__x86_64__)
    static const bool amd = __builtin_cpu_is("amd");
    return amd;
#else
    return false;
#endif
}

const BlockKernels& best_kernels() { return *kernels_named(nullptr); }

}  // namespace hybridindex
