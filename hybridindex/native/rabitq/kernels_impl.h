// One source for every instruction set, compiled with that set's flags and without contraction: estimates are the same on
// all. Everything here has internal linkage.
#include "rabitq/kernels.h"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include "simd/neon.h"
#endif

namespace hybridindex {
namespace {

#if defined(HYBRIDINDEX_RABITQ_AVX512)

// A lane for each row: its 4 bytes of a chunk are 4 indexes into 4 tables, and the 4 bytes found there are added.
// The dot products with one plane, added to twice those with the planes above it. Of tables with the bias of 1 bit, or of
// more.
template <int Q, bool OneBit>
void plane(const std::uint8_t* codes, std::int64_t chunks, const std::uint8_t* const* tables, std::int32_t* sums, bool first) {
    const __m512i low = _mm512_set1_epi8(0x0f), table = _mm512_set1_epi32(0x30201000), ones = _mm512_set1_epi8(1);
    // Of few queries each has two sums: one would wait for itself.
    constexpr int kSecond = Q <= 2 ? Q : 0;
    __m512i acc[Q + kSecond];
    for (__m512i& sum : acc) sum = _mm512_setzero_si512();
    for (std::int64_t c = 0; c < chunks; ++c) {
        const __m512i bytes = _mm512_loadu_si512(codes + c * kChunkBytes);
        const __m512i lows = _mm512_or_si512(_mm512_and_si512(bytes, low), table);
        const __m512i highs = _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(bytes, 4), low), table);
        for (int q = 0; q < Q; ++q) {
            const std::uint8_t* at = tables[q] + c * kTableBytes;
            acc[q] = _mm512_dpbusd_epi32(acc[q], _mm512_permutexvar_epi8(lows, _mm512_loadu_si512(at)), ones);
            __m512i& second = acc[kSecond + q];
            second = _mm512_dpbusd_epi32(second, _mm512_permutexvar_epi8(highs, _mm512_loadu_si512(at + 64)), ones);
        }
    }
    for (int q = 0; q < kSecond; ++q) acc[q] = _mm512_add_epi32(acc[q], acc[kSecond + q]);
    const __m512i bias = _mm512_set1_epi32(static_cast<int>(chunks) * 8 * table_bias(OneBit ? 1 : 2));
    for (int q = 0; q < Q; ++q) {
        __m512i sum = _mm512_sub_epi32(acc[q], bias);
        if (!first) {
            const __m512i above = _mm512_loadu_si512(sums + q * kCodedRows);
            sum = _mm512_add_epi32(sum, _mm512_add_epi32(above, above));
        }
        _mm512_storeu_si512(sums + q * kCodedRows, sum);
    }
}
constexpr int kMostQueries = 8;

#elif defined(HYBRIDINDEX_RABITQ_AVX2)

// Chunks after which sums of 16 bits may be full: each adds up to 4 * 2 * table_bias to each. Sums of bytes hold four
// tables of one bit, or two of more.
static_assert(4 * 2 * table_bias(1) < 256 && 2 * 2 * table_bias(2) < 256);
constexpr std::int64_t kFullAfter = 64;

template <int Q, bool OneBit>
void plane(const std::uint8_t* codes, std::int64_t chunks, const std::uint8_t* const* tables, std::int32_t* sums, bool first) {
    const __m256i low = _mm256_set1_epi8(0x0f);
    // Byte 0 of four rows, then byte 1 of the four...
    const __m256i by_byte = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15,
                                             0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m256i bias = _mm256_set1_epi32(static_cast<int>(chunks) * 8 * table_bias(OneBit ? 1 : 2));
    __m256i total[Q][2];
    for (int q = 0; q < Q; ++q) {
        for (int half = 0; half < 2; ++half) {
            std::int32_t* const above = sums + q * kCodedRows + 8 * half;
            __m256i sum = first ? _mm256_setzero_si256() : _mm256_loadu_si256(reinterpret_cast<const __m256i*>(above));
            total[q][half] = _mm256_sub_epi32(_mm256_add_epi32(sum, sum), bias);
        }
    }
    for (std::int64_t begin = 0; begin < chunks; begin += kFullAfter) {
        const std::int64_t end = chunks - begin < kFullAfter ? chunks : begin + kFullAfter;
        // Sums of even bytes with 256 times those of odd ones, and of odd ones.
        __m256i both[Q], odd[Q];
        for (int q = 0; q < Q; ++q) both[q] = odd[q] = _mm256_setzero_si256();
        for (std::int64_t c = begin; c < end; ++c) {
            const auto rows = [&](int at) {
                return _mm256_shuffle_epi8(
                    _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + c * kChunkBytes + at)), by_byte);
            };
            const __m256i front = rows(0), back = rows(32);
            // Bytes 0 of all rows, and bytes 1; then bytes 2 and 3. Rows come as 0-3, 8-11, 4-7, 12-15.
            const __m256i pairs[2] = {_mm256_permute4x64_epi64(_mm256_unpacklo_epi32(front, back), 0xd8),
                                      _mm256_permute4x64_epi64(_mm256_unpackhi_epi32(front, back), 0xd8)};
            const __m256i nibbles[4] = {_mm256_and_si256(pairs[0], low), _mm256_and_si256(pairs[1], low),
                                        _mm256_and_si256(_mm256_srli_epi16(pairs[0], 4), low),
                                        _mm256_and_si256(_mm256_srli_epi16(pairs[1], 4), low)};
            for (int q = 0; q < Q; ++q) {
                const __m256i* const table = reinterpret_cast<const __m256i*>(tables[q] + c * kTableBytes);
                const auto found = [&](int t) { return _mm256_shuffle_epi8(_mm256_loadu_si256(table + t), nibbles[t]); };
                const auto add = [&](__m256i bytes) {
                    both[q] = _mm256_add_epi16(both[q], bytes);
                    odd[q] = _mm256_add_epi16(odd[q], _mm256_srli_epi16(bytes, 8));
                };
                const __m256i lows = _mm256_add_epi8(found(0), found(1)), highs = _mm256_add_epi8(found(2), found(3));
                if constexpr (OneBit) {
                    add(_mm256_add_epi8(lows, highs));
                } else {
                    add(lows);
                    add(highs);
                }
            }
        }
        for (int q = 0; q < Q; ++q) {
            const __m256i even = _mm256_sub_epi16(both[q], _mm256_slli_epi16(odd[q], 8));
            const auto wide = [](__m256i x) {
                return _mm256_add_epi32(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(x)),
                                        _mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 1)));
            };
            const __m256i evens = wide(even), odds = wide(odd[q]);
            total[q][0] = _mm256_add_epi32(total[q][0], _mm256_unpacklo_epi32(evens, odds));
            total[q][1] = _mm256_add_epi32(total[q][1], _mm256_unpackhi_epi32(evens, odds));
        }
    }
    for (int q = 0; q < Q; ++q)
        for (int half = 0; half < 2; ++half)
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + q * kCodedRows + 8 * half), total[q][half]);
}
constexpr int kMostQueries = 4;

#elif defined(HYBRIDINDEX_RABITQ_NEON)

// Sums of bytes hold four tables of one bit, or two of more; those of 16 bits so many chunks.
constexpr std::int64_t kFullAfter = 64;
static_assert(4 * 2 * table_bias(1) < 256 && 2 * 2 * table_bias(2) < 256 && kFullAfter * 8 * 2 * table_bias(2) < 65536);

template <int Q, bool OneBit>
void plane(const std::uint8_t* codes, std::int64_t chunks, const std::uint8_t* const* tables, std::int32_t* sums,
           bool first) {
    const uint8x16_t low = vdupq_n_u8(0x0f);
    const std::int32_t bias = static_cast<std::int32_t>(chunks) * 8 * table_bias(OneBit ? 1 : 2);
    for (int i = 0; i < Q * kCodedRows; ++i) sums[i] = (first ? 0 : 2 * sums[i]) - bias;
    for (std::int64_t begin = 0; begin < chunks; begin += kFullAfter) {
        const std::int64_t end = chunks - begin < kFullAfter ? chunks : begin + kFullAfter;
        // Of rows below 8, and of the others.
        uint16x8_t acc[Q][2];
        for (int q = 0; q < Q; ++q) acc[q][0] = acc[q][1] = vdupq_n_u16(0);
        for (std::int64_t c = begin; c < end; ++c) {
            const uint8x16x4_t bytes = vld4q_u8(codes + c * kChunkBytes);  // byte 0 of all rows, byte 1...
            uint8x16_t nibbles[8];
            for (int b = 0; b < 4; ++b) {
                nibbles[b] = vandq_u8(bytes.val[b], low);
                nibbles[4 + b] = vshrq_n_u8(bytes.val[b], 4);
            }
#pragma GCC unroll 4
            for (int q = 0; q < Q; ++q) {
                const std::uint8_t* const table = tables[q] + c * kTableBytes;
                const auto two = [&](int t) {
                    return vaddq_u8(vqtbl1q_u8(vld1q_u8(table + 16 * t), nibbles[t]),
                                    vqtbl1q_u8(vld1q_u8(table + 16 * t + 16), nibbles[t + 1]));
                };
                const auto add = [&](uint8x16_t found) {
                    acc[q][0] = vaddw_u8(acc[q][0], vget_low_u8(found));
                    acc[q][1] = vaddw_high_u8(acc[q][1], found);
                };
                if constexpr (OneBit) {
                    add(vaddq_u8(two(0), two(2)));
                    add(vaddq_u8(two(4), two(6)));
                } else {
                    for (int t = 0; t < 8; t += 2) add(two(t));
                }
            }
        }
        for (int q = 0; q < Q; ++q)
            for (int r = 0; r < kCodedRows; ++r) sums[q * kCodedRows + r] += acc[q][r / 8][r % 8];
    }
}
constexpr int kMostQueries = 4;

#else

template <int Q, bool OneBit>
void plane(const std::uint8_t* codes, std::int64_t chunks, const std::uint8_t* const* tables, std::int32_t* sums, bool first) {
    static_assert(Q == 1);
    for (int r = 0; r < kCodedRows; ++r) {
        std::int32_t sum = 0;
        for (std::int64_t c = 0; c < chunks; ++c) {
            const std::uint8_t* const bytes = codes + c * kChunkBytes + 4 * r;
            const std::uint8_t* const table = tables[0] + c * kTableBytes;
            for (int b = 0; b < 4; ++b) sum += table[16 * b + (bytes[b] & 15)] + table[64 + 16 * b + (bytes[b] >> 4)];
        }
        sum -= static_cast<std::int32_t>(chunks) * 8 * table_bias(OneBit ? 1 : 2);
        sums[r] = first ? sum : 2 * sums[r] + sum;
    }
}
constexpr int kMostQueries = 1;

#endif

#if defined(HYBRIDINDEX_RABITQ_NEON_DOT)

// A block's numbers are unpacked and multiplied by those of the queries where that pays: unpacking takes as long as
// looking up for a few queries. By counted cycles; one bit is never worth it.
constexpr bool pays(int bits, int n) { return bits > 1 && n >= (bits == 2 ? 16 : 8); }
constexpr std::int64_t kUnpackedChunks = 8;

// A vector for each four dimensions of each four rows of a chunk: [dimensions / 4][rows / 4].
template <int Bits>
void unpack(const std::uint8_t* planes, std::int64_t plane_bytes, std::int8_t* out) {
    const uint8x16_t bits[2] = {vreinterpretq_u8_u32(vdupq_n_u32(0x08040201)),
                                vreinterpretq_u8_u32(vdupq_n_u32(0x80402010))};
    const uint8x16_t first =
        vreinterpretq_u8_u64(vcombine_u64(vcreate_u64(0x0404040400000000), vcreate_u64(0x0c0c0c0c08080808)));
    for (int rows = 0; rows < 4; ++rows)
        for (int b = 0; b < 4; ++b) {
            uint8x16_t numbers[2];
            const uint8x16_t byte = vaddq_u8(first, vdupq_n_u8(static_cast<std::uint8_t>(b)));
            for (int p = 0; p < Bits; ++p) {
                const uint8x16_t bytes = vqtbl1q_u8(vld1q_u8(planes + p * plane_bytes + 16 * rows), byte);
                for (int half = 0; half < 2; ++half) {
                    const uint8x16_t set = vtstq_u8(bytes, bits[half]);
                    // Two's complement: the highest bit, inverted, is the sign.
                    numbers[half] = p == 0 ? vmvnq_u8(set) : vsliq_n_u8(set, numbers[half], 1);
                }
            }
            // Twice that, and 1.
            for (int half = 0; half < 2; ++half) {
                const uint8x16_t odd = vsliq_n_u8(vdupq_n_u8(0xff), numbers[half], 1);
                vst1q_s8(out + 16 * (4 * (2 * b + half) + rows), vreinterpretq_s8_u8(odd));
            }
        }
}

template <int Q>
void dots(const std::int8_t* unpacked, std::int64_t chunks, const std::int8_t* const* whole, std::int64_t first_dim,
          std::int32_t* sums) {
    int32x4_t acc[Q][4];
    for (int q = 0; q < Q; ++q)
        for (int rows = 0; rows < 4; ++rows) acc[q][rows] = vld1q_s32(sums + q * kCodedRows + 4 * rows);
    for (std::int64_t half = 0; half < 2 * chunks; ++half) {
        int8x16_t numbers[Q];
        for (int q = 0; q < Q; ++q) numbers[q] = vld1q_s8(whole[q] + first_dim + 16 * half);
        const auto four = [&]<int Lane>() {
            for (int rows = 0; rows < 4; ++rows) {
                const int8x16_t levels = vld1q_s8(unpacked + 256 * half + 64 * Lane + 16 * rows);
                for (int q = 0; q < Q; ++q) acc[q][rows] = vdotq_laneq_s32(acc[q][rows], levels, numbers[q], Lane);
            }
        };
        four.template operator()<0>();
        four.template operator()<1>();
        four.template operator()<2>();
        four.template operator()<3>();
    }
    for (int q = 0; q < Q; ++q)
        for (int rows = 0; rows < 4; ++rows) vst1q_s32(sums + q * kCodedRows + 4 * rows, acc[q][rows]);
}

void products_by_dots(const std::uint8_t* planes, int bits, std::int64_t chunks, const std::int8_t* const* whole, int n,
                      std::int32_t* sums) {
    std::int8_t unpacked[kUnpackedChunks * kChunkDims * kCodedRows];
    std::memset(sums, 0, static_cast<std::size_t>(n) * kCodedRows * sizeof(*sums));
    for (std::int64_t c = 0; c < chunks; c += kUnpackedChunks) {
        const std::int64_t here = chunks - c < kUnpackedChunks ? chunks - c : kUnpackedChunks;
        for (std::int64_t i = 0; i < here; ++i)
            (bits == 2 ? unpack<2> : unpack<4>)(planes + (c + i) * kChunkBytes, chunks * kChunkBytes,
                                                unpacked + i * kChunkDims * kCodedRows);
        int q = 0;
        for (; q + 4 <= n; q += 4) dots<4>(unpacked, here, whole + q, c * kChunkDims, sums + q * kCodedRows);
        for (; q < n; ++q) dots<1>(unpacked, here, whole + q, c * kChunkDims, sums + q * kCodedRows);
    }
}

#endif

template <int Q>
inline void planes_of(const std::uint8_t* planes, int bits, std::int64_t chunks, const std::uint8_t* const* tables,
                      std::int32_t* sums) {
    if (bits == 1) return plane<Q, true>(planes, chunks, tables, sums, true);
    for (int p = 0; p < bits; ++p) plane<Q, false>(planes + p * chunks * kChunkBytes, chunks, tables, sums, p == 0);
}

void products(const std::uint8_t* planes, int bits, std::int64_t chunks, const std::uint8_t* const* tables,
              [[maybe_unused]] const std::int8_t* const* whole, int n, std::int32_t* sums) {
#if defined(HYBRIDINDEX_RABITQ_NEON_DOT)
    if (pays(bits, n)) return products_by_dots(planes, bits, chunks, whole, n, sums);
#endif
    int q = 0;
    if constexpr (kMostQueries >= 8)
        for (; q + 8 <= n; q += 8) planes_of<8>(planes, bits, chunks, tables + q, sums + q * kCodedRows);
    if constexpr (kMostQueries >= 4) {
        for (; q + 4 <= n; q += 4) planes_of<4>(planes, bits, chunks, tables + q, sums + q * kCodedRows);
        for (; q + 2 <= n; q += 2) planes_of<2>(planes, bits, chunks, tables + q, sums + q * kCodedRows);
    }
    for (; q < n; ++q) planes_of<1>(planes, bits, chunks, tables + q, sums + q * kCodedRows);
}

inline std::uint32_t at_most(const float* values, float limit) {
#if defined(HYBRIDINDEX_RABITQ_AVX512)
    return _mm512_cmp_ps_mask(_mm512_loadu_ps(values), _mm512_set1_ps(limit), _CMP_LE_OQ);
#elif defined(HYBRIDINDEX_RABITQ_AVX2)
    const __m256 most = _mm256_set1_ps(limit);
    const auto mask = [&](const float* half) {
        return static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(half), most, _CMP_LE_OQ)));
    };
    return mask(values) | mask(values + 8) << 8;
#elif defined(HYBRIDINDEX_RABITQ_NEON)
    const float32x4_t most = vdupq_n_f32(limit);
    const auto two = [&](const float* half) {
        return vuzp1q_u16(vreinterpretq_u16_u32(vcleq_f32(vld1q_f32(half), most)),
                          vreinterpretq_u16_u32(vcleq_f32(vld1q_f32(half + 4), most)));
    };
    return mask_of(two(values), two(values + 8));
#else
    std::uint32_t mask = 0;
    for (int r = 0; r < kCodedRows; ++r) mask |= static_cast<std::uint32_t>(values[r] <= limit) << r;
    return mask;
#endif
}

// A number for each row.
typedef float Floats __attribute__((vector_size(4 * kCodedRows)));
typedef std::int32_t Ints __attribute__((vector_size(4 * kCodedRows)));

template <typename Of, typename Value>
inline Of load(const Value* values) {
    Of loaded;
    std::memcpy(&loaded, values, sizeof(loaded));
    return loaded;
}

template <bool L2>
inline void estimates_of(const float* f, const float* g, const float* h, const std::int32_t* sums, int n,
                         const QueryFactors& queries, float* out, std::uint32_t* near) {
    const Floats rows_f = load<Floats>(f), rows_g = load<Floats>(g), rows_h = L2 ? load<Floats>(h) : Floats{};
    for (int q = 0; q < n; ++q, sums += kCodedRows, out += kCodedRows) {
        const Floats sum = __builtin_convertvector(load<Ints>(sums), Floats);
        const Floats x = ((rows_f * sum) * queries.u[q] + rows_g * queries.w[q]) + queries.centre_products[q];
        const Floats found = L2 ? rows_h + 2.0f * -x : -x;
        std::memcpy(out, &found, sizeof(found));
        near[q] = at_most(out, queries.limits[q]);
    }
}

void estimates(const float* f, const float* g, const float* h, const std::int32_t* sums, int n,
               const QueryFactors& queries, float* out, std::uint32_t* near) {
    if (h == nullptr)
        estimates_of<false>(f, g, h, sums, n, queries, out, near);
    else
        estimates_of<true>(f, g, h, sums, n, queries, out, near);
}

}  // namespace
}  // namespace hybridindex
