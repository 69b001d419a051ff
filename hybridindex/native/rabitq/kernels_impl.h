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

// The block that is read run.ahead bytes after block i; block i itself where nothing is to be fetched.
inline const std::uint8_t* block_ahead(const CodedRun& run, std::int64_t i) {
    const std::int64_t at = i * run.block_bytes + run.ahead, behind = at - run.count() * run.block_bytes;
    if (run.ahead == 0 || behind >= run.later_bytes) return run.blocks + i * run.block_bytes;
    return behind < 0 ? run.blocks + at : run.later + behind;
}

// The rows of block i, as bits.
inline std::uint32_t rows_of(const CodedRun& run, std::int64_t i) {
    const std::int64_t left = run.rows - i * kCodedRows;
    return left >= kCodedRows ? 0xffffu : (1u << left) - 1u;
}

#if defined(HYBRIDINDEX_RABITQ_AVX512)

constexpr int kTogether = 8;

// A lane for each row: its 4 bytes of a chunk are 4 indexes into 4 tables, and the 4 bytes found there are added. All of
// a block happens in registers.
template <int Q, int Bits, bool L2>
std::int64_t find_for(const CodedRun& run, std::int64_t first, const QueriesOfRun& queries, std::int64_t position,
                      FoundRows* const* found) {
    const __m512i low = _mm512_set1_epi8(0x0f), table = _mm512_set1_epi32(0x30201000), ones = _mm512_set1_epi8(1);
    const __m512i bias = _mm512_set1_epi32(static_cast<int>(run.chunks) * 8 * table_bias(Bits) * ((1 << Bits) - 1));
    const __m512i sign = _mm512_set1_epi32(static_cast<int>(0x80000000u));
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    // Of few queries each has two sums: one would wait for itself.
    constexpr int kSums = Q >= 8 ? 1 : 2;
    const std::int64_t count = run.count();
    for (std::int64_t i = first; i < count; ++i) {
        const std::uint8_t* codes = run.blocks + i * run.block_bytes;
        const std::uint8_t* ahead = block_ahead(run, i);
        __m512i sums[kSums][Q];
#pragma GCC unroll 8
        for (int q = 0; q < Q; ++q) {
            sums[0][q] = _mm512_setzero_si512();
            if constexpr (kSums > 1) sums[1][q] = _mm512_setzero_si512();
        }
#pragma GCC unroll 4
        for (int p = 0; p < Bits; ++p) {
            if (p > 0) {
#pragma GCC unroll 8
                for (int q = 0; q < Q; ++q) {
                    sums[0][q] = _mm512_add_epi32(sums[0][q], sums[0][q]);
                    if constexpr (kSums > 1) sums[1][q] = _mm512_add_epi32(sums[1][q], sums[1][q]);
                }
            }
            for (std::int64_t c = 0; c < run.chunks; ++c, codes += kChunkBytes, ahead += kChunkBytes) {
                // Line by line: many at once would keep what is read now waiting.
                __builtin_prefetch(ahead, 0, 3);
                const __m512i bytes = _mm512_loadu_si512(codes);
                const __m512i lows = _mm512_ternarylogic_epi32(bytes, low, table, 0xea);
                const __m512i highs = _mm512_ternarylogic_epi32(_mm512_srli_epi16(bytes, 4), low, table, 0xea);
#pragma GCC unroll 8
                for (int q = 0; q < Q; ++q) {
                    const std::uint8_t* const at = queries.tables[q] + c * kTableBytes;
                    sums[0][q] = _mm512_dpbusd_epi32(
                        sums[0][q], _mm512_permutexvar_epi8(lows, _mm512_loadu_si512(at)), ones);
                    sums[kSums - 1][q] = _mm512_dpbusd_epi32(
                        sums[kSums - 1][q], _mm512_permutexvar_epi8(highs, _mm512_loadu_si512(at + 64)), ones);
                }
            }
        }
        __builtin_prefetch(ahead, 0, 3);
        if constexpr (L2) __builtin_prefetch(ahead + 64, 0, 3);
        const auto halves = [&](int at) {
            return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + at)));
        };
        const __m512 f = halves(0), g = halves(32), h = L2 ? _mm512_loadu_ps(codes + 64) : _mm512_setzero_ps();
        const __mmask16 there = static_cast<__mmask16>(rows_of(run, i));
        __m512 estimates[Q];
        __mmask16 near[Q];
        unsigned any = 0;
#pragma GCC unroll 8
        for (int q = 0; q < Q; ++q) {
            __m512i sum = sums[0][q];
            if constexpr (kSums > 1) sum = _mm512_add_epi32(sum, sums[1][q]);
            const __m512 product = _mm512_mul_ps(
                _mm512_mul_ps(f, _mm512_cvtepi32_ps(_mm512_sub_epi32(sum, bias))), _mm512_set1_ps(queries.u[q]));
            const __m512 x = _mm512_add_ps(_mm512_add_ps(product, _mm512_mul_ps(g, _mm512_set1_ps(queries.w[q]))),
                                           _mm512_set1_ps(queries.centre_products[q]));
            __m512 estimate = _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(x), sign));
            if constexpr (L2) estimate = _mm512_add_ps(h, _mm512_add_ps(estimate, estimate));
            estimates[q] = estimate;
            near[q] = _mm512_mask_cmp_ps_mask(there, estimate, _mm512_set1_ps(queries.limits[q]), _CMP_LE_OQ);
            any |= near[q];
        }
        if (any == 0) continue;
        const std::int64_t origin = position + i * kCodedRows;
        bool full = false;
#pragma GCC unroll 8
        for (int q = 0; q < Q; ++q) {
            if (near[q] == 0) continue;
            FoundRows& rows = *found[q];
            float* const to = rows.estimates + rows.count;
            std::int64_t* const places = rows.positions + rows.count;
            // -0 becomes 0.
            _mm512_storeu_ps(to, _mm512_add_ps(_mm512_maskz_compress_ps(near[q], estimates[q]), _mm512_setzero_ps()));
            const __m512i lanes = _mm512_maskz_compress_epi32(near[q], lane);
            const __m512i from = _mm512_set1_epi64(origin);
            _mm512_storeu_si512(places, _mm512_add_epi64(from, _mm512_cvtepu32_epi64(_mm512_castsi512_si256(lanes))));
            _mm512_storeu_si512(places + 8,
                                _mm512_add_epi64(from, _mm512_cvtepu32_epi64(_mm512_extracti64x4_epi64(lanes, 1))));
            rows.count += __builtin_popcount(near[q]);
            full |= rows.full();
        }
        if (full) return i + 1;
    }
    return count;
}

template <int Bits, bool L2>
std::int64_t find_all(const CodedRun& run, std::int64_t first, const QueriesOfRun& queries, int n, std::int64_t position,
                      FoundRows* const* found) {
    switch (n) {
        case 1: return find_for<1, Bits, L2>(run, first, queries, position, found);
        case 2: return find_for<2, Bits, L2>(run, first, queries, position, found);
        case 3: return find_for<3, Bits, L2>(run, first, queries, position, found);
        case 4: return find_for<4, Bits, L2>(run, first, queries, position, found);
        case 5: return find_for<5, Bits, L2>(run, first, queries, position, found);
        case 6: return find_for<6, Bits, L2>(run, first, queries, position, found);
        case 7: return find_for<7, Bits, L2>(run, first, queries, position, found);
        default: return find_for<8, Bits, L2>(run, first, queries, position, found);
    }
}

template <int Bits>
std::int64_t find_coded(const CodedRun& run, std::int64_t first, const QueriesOfRun& queries, int n, std::int64_t position,
                        FoundRows* const* found) {
    return run.l2 ? find_all<Bits, true>(run, first, queries, n, position, found)
                  : find_all<Bits, false>(run, first, queries, n, position, found);
}

std::int64_t find(const CodedRun& run, std::int64_t first, const QueriesOfRun& queries, int n, std::int64_t position,
                  FoundRows* const* found, std::int32_t*, float*) {
    if (run.bits == 1) return find_coded<1>(run, first, queries, n, position, found);
    if (run.bits == 2) return find_coded<2>(run, first, queries, n, position, found);
    return find_coded<4>(run, first, queries, n, position, found);
}

#else

#if defined(HYBRIDINDEX_RABITQ_AVX2)

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
    if constexpr (kMostQueries >= 4) {
        for (; q + 4 <= n; q += 4) planes_of<4>(planes, bits, chunks, tables + q, sums + q * kCodedRows);
        for (; q + 2 <= n; q += 2) planes_of<2>(planes, bits, chunks, tables + q, sums + q * kCodedRows);
    }
    for (; q < n; ++q) planes_of<1>(planes, bits, chunks, tables + q, sums + q * kCodedRows);
}

inline std::uint32_t at_most(const float* values, float limit) {
#if defined(HYBRIDINDEX_RABITQ_AVX2)
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

// Estimates of a block from the sum of one query.
template <bool L2>
inline void estimates_of(const float* f, const float* g, const float* h, const std::int32_t* sums, float u, float w,
                         float centre_product, float* out) {
    const Floats rows_f = load<Floats>(f), rows_g = load<Floats>(g);
    const Floats sum = __builtin_convertvector(load<Ints>(sums), Floats);
    const Floats x = ((rows_f * sum) * u + rows_g * w) + centre_product;
    const Floats found = L2 ? load<Floats>(h) + 2.0f * -x : -x;
    std::memcpy(out, &found, sizeof(found));
}

constexpr int kTogether = 256;

std::int64_t find(const CodedRun& run, std::int64_t first, const QueriesOfRun& queries, int n, std::int64_t position,
                  FoundRows* const* found, std::int32_t* sums, float* out) {
    const std::int64_t count = run.count(), plane_bytes = run.chunks * kChunkBytes;
    for (std::int64_t i = first; i < count; ++i) {
        const std::uint8_t* const ahead = block_ahead(run, i);
        for (std::int64_t byte = 0; byte < run.block_bytes; byte += 64) __builtin_prefetch(ahead + byte, 0, 3);
        const std::uint8_t* const planes = run.blocks + i * run.block_bytes;
        const std::uint8_t* const behind = planes + run.bits * plane_bytes;
        float f[kCodedRows], g[kCodedRows], h[kCodedRows];
        products(planes, run.bits, run.chunks, queries.tables, queries.whole, n, sums);
        run.decode_f16(behind, kCodedRows, f);
        run.decode_f16(behind + 2 * kCodedRows, kCodedRows, g);
        if (run.l2) std::memcpy(h, behind + 4 * kCodedRows, sizeof(h));
        const std::uint32_t there = rows_of(run, i);
        bool full = false;
        for (int q = 0; q < n; ++q) {
            const std::int32_t* const own = sums + q * kCodedRows;
            if (run.l2)
                estimates_of<true>(f, g, h, own, queries.u[q], queries.w[q], queries.centre_products[q], out);
            else
                estimates_of<false>(f, g, h, own, queries.u[q], queries.w[q], queries.centre_products[q], out);
            std::uint32_t near = at_most(out, queries.limits[q]) & there;
            if (near == 0) continue;
            FoundRows& rows = *found[q];
            for (; near != 0; near &= near - 1) {
                const int r = __builtin_ctz(near);
                rows.estimates[rows.count] = out[r] + 0.0f;  // -0 becomes 0
                rows.positions[rows.count++] = position + i * kCodedRows + r;
            }
            full |= rows.full();
        }
        if (full) return i + 1;
    }
    return count;
}

#endif

// Ordered as the float is.
inline std::int32_t key_of(float x) {
    std::int32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

inline std::int64_t count_up_to(const std::int32_t* keys, std::int64_t n, std::int32_t most) {
    std::int32_t count = 0;
    for (std::int64_t i = 0; i < n; ++i) count += keys[i] <= most;
    return count;
}

std::int64_t least_key(const float* estimates, std::int64_t n, std::int64_t k, std::int32_t* keys, std::int32_t* last) {
    for (std::int64_t i = 0; i < n; ++i) keys[i] = key_of(estimates[i]);
    std::int32_t low = keys[0], high = keys[0];
    for (std::int64_t i = 0; i < n; ++i) {
        low = keys[i] < low ? keys[i] : low;
        high = keys[i] > high ? keys[i] : high;
    }
    std::int64_t within = n;
    while (low < high && within != k) {
        const std::int32_t middle = static_cast<std::int32_t>(low + (static_cast<std::int64_t>(high) - low) / 2);
        const std::int64_t count = count_up_to(keys, n, middle);
        if (count >= k)
            high = middle, within = count;
        else
            low = middle + 1;
    }
    *last = high;
    return within;
}

}  // namespace
}  // namespace hybridindex
