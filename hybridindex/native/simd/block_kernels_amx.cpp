// The AVX-512 kernels with filters on AMX tiles: 16 rows x 16 queries x 64 bytes an instruction.
#include "simd/block_kernels.h"
#if defined(__AVX512VNNI__) && defined(__AVX512BF16__) && defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__linux__)
#define HYBRIDINDEX_LANES 16
#include "simd/block_kernels_impl.h"

namespace hybridindex {
namespace {

constexpr int kTile = 16;
// Fewer queries leave so much of a tile empty that the vector unit is faster.
constexpr int kFewestBytes = 4;
static_assert(kFewestHalves >= kFewestBytes);

std::int64_t amx_packed_bytes(int n, std::int64_t row_bytes) { return (n + kTile - 1) / kTile * kTile * row_bytes; }

// 16 rows of 16 words each way. `row(i)` is where row i is read.
template <typename Row>
inline void transpose(const Row& row, __m512i* out) {
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) a[i] = row(i);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
        b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
        b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
        b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        out[i] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88);
        out[i + 8] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd);
        out[i + 4] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88);
        out[i + 12] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xdd);
    }
}

// Tiles of 16 queries, 64 bytes after 64: inside a tile, four bytes of query 0, the same four of query 1, ...
void amx_pack(const std::int8_t* const* queries, int n, std::int64_t row_bytes, std::int8_t* packed) {
    if (n < kFewestBytes) return pack(queries, n, row_bytes, packed);
    for (int first = 0; first < n; first += kTile)
        for (std::int64_t i = 0; i < row_bytes; i += kFilterStep, packed += kTile * kFilterStep)
            transpose([&](int q) { return first + q < n ? _mm512_loadu_si512(queries[first + q] + i) : _mm512_setzero_si512(); },
                      reinterpret_cast<__m512i*>(packed));
}

// A tile of dot products, rows by queries, against the limits of its queries.
template <bool Halves>
inline int passing(const void* dots, int first, int n, const QueryLimits& limits, const RowTerms& terms,
                   std::uint32_t* found) {
    const __mmask16 real = static_cast<__mmask16>(n < kTile ? (1u << n) - 1u : 0xffffu);
    const __m512 base = _mm512_loadu_ps(limits.base + first), square = _mm512_loadu_ps(limits.square + first),
                 length = _mm512_loadu_ps(limits.length + first);
    int count = 0;
    for (int r = 0; r < kBlockRows; ++r) {
        const void* row = static_cast<const char*>(dots) + r * kTile * 4;
        __m512 value = Halves ? _mm512_load_ps(row) : _mm512_cvtepi32_ps(_mm512_load_si512(row));
        value = _mm512_fmadd_ps(square, _mm512_set1_ps(terms.square[r]), value);
        value = _mm512_fnmadd_ps(length, _mm512_set1_ps(terms.length[r]), value);
        // What overflowed to no number says nothing: it passes.
        std::uint32_t mask = _mm512_mask_cmp_ps_mask(real, value, base, _CMP_NGT_UQ);
        for (; mask != 0; mask &= mask - 1)
            found[count++] = static_cast<std::uint32_t>(first + __builtin_ctz(mask)) << 4 | static_cast<std::uint32_t>(r);
    }
    return count;
}

// Tile registers are named by constants: sums 0 and 1, rows 2, queries 3 and 4.
#define HYBRIDINDEX_MULTIPLY(SUM, QUERIES) \
    if constexpr (Halves)                  \
        _tile_dpbf16ps(SUM, 2, QUERIES);   \
    else                                   \
        _tile_dpbusd(SUM, 2, QUERIES)

template <bool Halves>
inline int filter_tiles_amx(const std::uint8_t* rows, std::int64_t stride, const std::int8_t* packed, int n,
                              std::int64_t row_bytes, const QueryLimits& limits, const RowTerms& terms,
                              std::uint32_t* found, const char* next, std::int64_t next_bytes) {
    // In equal shares by all passes over the rows: a burst would keep the tiles waiting.
    const std::int64_t passes = (n + 2 * kTile - 1) / (2 * kTile), share = passes * row_bytes;
    const std::int64_t lines = (next_bytes + share - 1) / share;
    const char* const fetched = next + next_bytes;
    const auto fetch = [&next, fetched, lines] {
        for (std::int64_t line = 0; line < lines && next < fetched; ++line, next += 64) __builtin_prefetch(next, 0, 2);
    };
    alignas(64) char dots[2][kTile * kTile * 4];
    int count = 0;
    int q = 0;
    for (; q + kTile < n; q += 2 * kTile) {
        const std::int8_t* first = packed + q * row_bytes;
        const std::int8_t* second = first + kTile * row_bytes;
        _tile_zero(0);
        _tile_zero(1);
        for (std::int64_t i = 0; i < row_bytes; i += kFilterStep) {
            _tile_loadd(2, rows + i, stride);
            _tile_loadd(3, first + i * kTile, 64);
            fetch();
            HYBRIDINDEX_MULTIPLY(0, 3);
            _tile_loadd(4, second + i * kTile, 64);
            HYBRIDINDEX_MULTIPLY(1, 4);
        }
        _tile_stored(0, dots[0], 64);
        _tile_stored(1, dots[1], 64);
        count += passing<Halves>(dots[0], q, kTile, limits, terms, found + count);
        count += passing<Halves>(dots[1], q + kTile, n - q - kTile, limits, terms, found + count);
    }
    if (q < n) {
        const std::int8_t* first = packed + q * row_bytes;
        _tile_zero(0);
        for (std::int64_t i = 0; i < row_bytes; i += kFilterStep) {
            _tile_loadd(2, rows + i, stride);
            _tile_loadd(3, first + i * kTile, 64);
            fetch();
            HYBRIDINDEX_MULTIPLY(0, 3);
        }
        _tile_stored(0, dots[0], 64);
        count += passing<Halves>(dots[0], q, n - q, limits, terms, found + count);
    }
    return count;
}

int amx_filter(const std::uint8_t* rows, std::int64_t stride, const std::int8_t* packed, int n, std::int64_t row_bytes,
               const QueryLimits& limits, const RowTerms& terms, std::uint32_t* found, const void* next) {
    if (n < kFewestBytes) return filter(rows, stride, packed, n, row_bytes, limits, terms, found, next);
    return filter_tiles_amx<false>(rows, stride, packed, n, row_bytes, limits, terms, found,
                                   static_cast<const char*>(next), next == nullptr ? 0 : kBlockRows * row_bytes);
}

int amx_filter_halves(const std::uint8_t* rows, std::int64_t stride, const std::int8_t* packed, int n,
                      std::int64_t row_bytes, const QueryLimits& limits, const RowTerms& terms, std::uint32_t* found,
                      const void* next, std::int64_t next_bytes) {
    return filter_tiles_amx<true>(rows, stride, packed, n, row_bytes, limits, terms, found,
                                  static_cast<const char*>(next), next_bytes);
}

// Far below any length, and no product with the length of a query overflows.
constexpr float kNoLength = -0x1p60f;

void round_rows(const float* rows, std::int64_t stride, int n_rows, std::int64_t dim, std::int64_t row_bytes,
                std::uint8_t* halves, RowTerms* out, const void* next, std::int64_t next_bytes) {
    const char* at = static_cast<const char*>(next);
    const char* const fetched = at + next_bytes;
    vec squares[kBlockRows] = {};
    for (int r = 0; r < n_rows; ++r, rows += stride, halves += row_bytes) {
        __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
        std::int64_t i = 0;
        for (; i + 32 <= dim; i += 32) {
            const __m512 low = _mm512_loadu_ps(rows + i), high = _mm512_loadu_ps(rows + i + 16);
            if (at < fetched) __builtin_prefetch(at, 0, 2), at += 64;
            _mm512_storeu_si512(halves + 2 * i, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
            even = _mm512_fmadd_ps(low, low, even);
            odd = _mm512_fmadd_ps(high, high, odd);
        }
        if (i < dim) {  // half a step
            const __m512 low = _mm512_loadu_ps(rows + i);
            _mm512_storeu_si512(halves + 2 * i, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(_mm512_setzero_ps(), low)));
            even = _mm512_fmadd_ps(low, low, even);
        }
        squares[r] = reinterpret_cast<vec>(_mm512_add_ps(even, odd));
    }
    const __m512 sums = reinterpret_cast<__m512>(sum_lanes(squares));
    _mm512_storeu_ps(out->square, sums);
    // Rows that are not there never pass.
    const __mmask16 there = static_cast<__mmask16>((1u << n_rows) - 1u);
    _mm512_storeu_ps(out->length, _mm512_mask_sqrt_ps(_mm512_set1_ps(kNoLength), there, sums));
}

RoundedQuery round_query(const float* query, float factor, std::int64_t dim, std::uint16_t* halves) {
    __m512d square = _mm512_setzero_pd(), lost = square, kept = square;
    const auto add = [&](__m256 full, __m256 rounded) {
        const __m512d x = _mm512_cvtps_pd(full), y = _mm512_cvtps_pd(rounded), error = _mm512_sub_pd(x, y);
        square = _mm512_fmadd_pd(x, x, square);
        lost = _mm512_fmadd_pd(error, error, lost);
        kept = _mm512_fmadd_pd(y, y, kept);
    };
    const __m512i one = _mm512_set1_epi32(1), half = _mm512_set1_epi32(0x7fff);
    for (std::int64_t i = 0; i < dim; i += 16) {
        const __m512 w = _mm512_mul_ps(_mm512_set1_ps(factor), _mm512_loadu_ps(query + i));
        const __m512i bits = _mm512_castps_si512(w);
        // To the nearest, ties to even.
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
        const __m512i kept_bits = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(half, odd)), 16);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(halves + i), _mm512_cvtepi32_epi16(kept_bits));
        const __m512 rounded = _mm512_castsi512_ps(_mm512_slli_epi32(kept_bits, 16));
        add(_mm512_castps512_ps256(w), _mm512_castps512_ps256(rounded));
        add(_mm512_extractf32x8_ps(w, 1), _mm512_extractf32x8_ps(rounded, 1));
    }
    return {_mm512_reduce_add_pd(square), _mm512_reduce_add_pd(lost), _mm512_reduce_add_pd(kept)};
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
    made.filter_interleaved = nullptr;
    made.filter_halves = amx_filter_halves;
    made.begin = amx_begin;
    made.end = amx_end;
    made.round_rows = round_rows;
    made.round_query = round_query;
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
