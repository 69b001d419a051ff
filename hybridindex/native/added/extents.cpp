#include "added/extents.h"

#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>

namespace hybridindex {
namespace {

constexpr std::int64_t kWord = 8, kWordsBeside = 2;

void check(const ExtentBuffer& buffer, const std::int64_t* extent, std::int64_t number) {
    const std::int64_t size = extent[0], capacity = extent[1], offset = extent[2];
    const bool fits = size >= 0 && capacity >= size && offset >= 0 && offset % kWord == 0 && offset <= buffer.nbytes &&
                      capacity <= (buffer.nbytes - offset) / (buffer.code_size + kWordsBeside * kWord) &&
                      capacity * buffer.code_size % kWord == 0;
    if (!fits) throw std::out_of_range("extent " + std::to_string(number) + " leaves the buffer, or is not aligned");
}

}  // namespace

void move_extents(const ExtentBuffer& from, const ExtentBuffer& to, const ExtentMoves& moves) {
    for (std::int64_t i = 0; i < moves.n; ++i) {
        const std::int64_t *before = moves.before + 3 * i, *after = moves.after + 3 * i;
        check(from, before, i), check(to, after, i);
        const std::int64_t n_gone = moves.gone_starts[i + 1] - moves.gone_starts[i];
        if (n_gone < 0 || after[0] != before[0] - n_gone)
            throw std::invalid_argument("extent " + std::to_string(i) + " does not have the rows that are left");
        std::int64_t last = -1;
        for (std::int64_t g = moves.gone_starts[i]; g < moves.gone_starts[i + 1]; ++g) {
            if (moves.gone[g] <= last || moves.gone[g] >= before[0])
                throw std::out_of_range("rows that go from extent " + std::to_string(i) + " do not ascend within it");
            last = moves.gone[g];
        }
    }
    const std::size_t code_size = static_cast<std::size_t>(from.code_size);
    for (std::int64_t i = 0; i < moves.n; ++i) {
        const std::int64_t *before = moves.before + 3 * i, *after = moves.after + 3 * i;
        const std::uint8_t* const codes = from.base + before[2];
        std::uint8_t* const target = to.base + after[2];
        const std::uint8_t* const words = codes + before[1] * from.code_size;
        std::uint8_t* const words_target = target + after[1] * to.code_size;
        std::int64_t put = 0;
        const auto copy = [&](std::int64_t start, std::int64_t stop) {
            if (stop <= start) return;
            const std::size_t n = static_cast<std::size_t>(stop - start);
            std::memcpy(target + put * to.code_size, codes + start * from.code_size, n * code_size);
            for (std::int64_t w = 0; w < kWordsBeside; ++w)
                std::memcpy(words_target + (w * after[1] + put) * kWord, words + (w * before[1] + start) * kWord, n * kWord);
            put += stop - start;
        };
        std::int64_t start = 0;
        for (std::int64_t g = moves.gone_starts[i]; g < moves.gone_starts[i + 1]; ++g) {
            copy(start, moves.gone[g]);
            start = moves.gone[g] + 1;
        }
        copy(start, before[0]);
    }
}

void put_rows(const ExtentBuffer& to, const std::uint8_t* codes, const std::int64_t* order, const std::int64_t* at,
              std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i)
        if (order[i] < 0 || order[i] >= n || at[i] < 0 || at[i] > to.nbytes - to.code_size)
            throw std::out_of_range("row " + std::to_string(i) + " is none of the codes, or leaves the buffer");
    for (std::int64_t i = 0; i < n; ++i)
        std::memcpy(to.base + at[i], codes + order[i] * to.code_size, static_cast<std::size_t>(to.code_size));
}

void touch_ahead(const ExtentBuffer& buffer, std::int64_t start, std::int64_t nbytes) {
    constexpr std::int64_t kPageBytes = 4096;
    if (start < 0 || nbytes < 0 || start > buffer.nbytes - nbytes)
        throw std::out_of_range("bytes from " + std::to_string(start) + " leave the buffer");
    // A write, for reading gives every page the same zeros; one that loses none of another thread's, and that no compiler
    // takes for none.
    for (std::int64_t at = start; at < start + nbytes; at += kPageBytes) {
        std::uint8_t nothing = 0;
        std::atomic_ref(buffer.base[at]).compare_exchange_strong(nothing, 0, std::memory_order_relaxed);
    }
}

}  // namespace hybridindex
