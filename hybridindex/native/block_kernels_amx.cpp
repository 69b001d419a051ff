// The AVX-512 kernels with an integer filter on AMX tiles: 16 rows x 16 queries x 64 dimensions an instruction.
#include "block_kernels.h"
#if defined(__AVX512VNNI__) && defined(__AMX_INT8__) && defined(__linux__)
#define HYBRIDINDEX_LANES 16
#include "block_kernels_impl.h"

namespace hybridindex {
namespace {

constexpr int kTile = 16;
// Fewer queries leave so much of a tile empty that the vector unit is faster.
constexpr int kFewest = 4;

std::int64_t amx_packed_bytes(int n, std::int64_t dim) { return (n + kTile - 1) / kTile * kTile * dim; }

// Tiles of 16 queries, 64 dimensions after 64: inside a tile, four dimensions of query 0, the same four of query 1, ...
void amx_pack(const std::int8_t* const* queries, int n, std::int64_t dim, std::int8_t* packed) {
    if (n < kFewest) return pack(queries, n, dim, packed);
    for (int first = 0; first < n; first += kTile, packed += kTile * dim)
        for (int q = 0; q < kTile; ++q)
            for (std::int64_t i = 0; i < dim; i += 4) {
                std::int8_t* at = packed + i * kTile + q * 4;
                if (first + q < n)
                    std::memcpy(at, queries[first + q] + i, 4);
                else
                    std::memset(at, 0, 4);
            }
}

// Row r of `dots` (16 x 16) against the limits of 16 queries.
inline int passing(const std::int32_t* dots, int first, int n, const QueryLimits& limits, const RowTerms& terms,
                   std::uint32_t* found) {
    const __mmask16 real = static_cast<__mmask16>(n < kTile ? (1u << n) - 1u : 0xffffu);
    const __m512 base = _mm512_loadu_ps(limits.base + first), square = _mm512_loadu_ps(limits.square + first),
                 length = _mm512_loadu_ps(limits.length + first);
    int count = 0;
    for (int r = 0; r < kBlockRows; ++r) {
        __m512 value = _mm512_cvtepi32_ps(_mm512_load_si512(dots + r * kTile));
        value = _mm512_fmadd_ps(square, _mm512_set1_ps(terms.square[r]), value);
        value = _mm512_fnmadd_ps(length, _mm512_set1_ps(terms.length[r]), value);
        std::uint32_t mask = _mm512_mask_cmp_ps_mask(real, value, base, _CMP_LE_OQ);
        for (; mask != 0; mask &= mask - 1)
            found[count++] = static_cast<std::uint32_t>(first + __builtin_ctz(mask)) << 4 | static_cast<std::uint32_t>(r);
    }
    return count;
}

int amx_filter(const std::uint8_t* rows, std::int64_t stride, const std::int8_t* packed, int n, std::int64_t dim,
               const QueryLimits& limits, const RowTerms& terms, std::uint32_t* found, const void* next) {
    if (n < kFewest) return filter(rows, stride, packed, n, dim, limits, terms, found, next);
    const char* at = static_cast<const char*>(next);
    // The first pass over a block fetches the next one.
    const auto fetch = [&at] {
        if (at == nullptr) return;
        for (int line = 0; line < kTile; ++line, at += 64) __builtin_prefetch(at, 0, 2);
    };
    alignas(64) std::int32_t dots[2][kTile * kTile];
    int count = 0;
    int q = 0;
    for (; q + kTile < n; q += 2 * kTile) {
        const std::int8_t* first = packed + q * dim;
        const std::int8_t* second = first + kTile * dim;
        _tile_zero(0);
        _tile_zero(1);
        for (std::int64_t i = 0; i < dim; i += kCodeStep) {
            _tile_loadd(2, rows + i, stride);
            _tile_loadd(3, first + i * kTile, 64);
            if (q == 0) fetch();
            _tile_dpbusd(0, 2, 3);
            _tile_loadd(4, second + i * kTile, 64);
            _tile_dpbusd(1, 2, 4);
        }
        _tile_stored(0, dots[0], 64);
        _tile_stored(1, dots[1], 64);
        count += passing(dots[0], q, kTile, limits, terms, found + count);
        count += passing(dots[1], q + kTile, n - q - kTile, limits, terms, found + count);
    }
    if (q < n) {
        const std::int8_t* first = packed + q * dim;
        _tile_zero(0);
        for (std::int64_t i = 0; i < dim; i += kCodeStep) {
            _tile_loadd(2, rows + i, stride);
            _tile_loadd(3, first + i * kTile, 64);
            if (q == 0) fetch();
            _tile_dpbusd(0, 2, 3);
        }
        _tile_stored(0, dots[0], 64);
        count += passing(dots[0], q, n - q, limits, terms, found + count);
    }
    return count;
}

void amx_begin() {
    struct {
        std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
        std::uint16_t row_bytes[16] = {};
        std::uint8_t rows[16] = {};
    } config;
    static_assert(sizeof(config) == 64);
    for (int i = 0; i < 5; ++i) config.row_bytes[i] = 64, config.rows[i] = 16;
    // The intrinsic tells GCC of eight of the bytes that it reads.
    asm volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
}

void amx_end() { _tile_release(); }

constexpr BlockKernels with_tiles() {
    BlockKernels made = make_kernels("amx");
    made.packed_bytes = amx_packed_bytes;
    made.pack = amx_pack;
    made.filter = amx_filter;
    made.begin = amx_begin;
    made.end = amx_end;
    return made;
}

constexpr BlockKernels kernels = with_tiles();

}  // namespace

const BlockKernels* const amx_kernels = &kernels;

}  // namespace hybridindex
#else
namespace hybridindex {
const BlockKernels* const amx_kernels = nullptr;
}  // namespace hybridindex
#endif
