#include "device/copies.h"

#include <algorithm>
#include <stdexcept>

namespace hybridindex {
namespace {

// Sources are read when the stream gets there: CU_MEMCPY_SRC_ACCESS_ORDER_STREAM.
constexpr int kInStreamOrder = 1;
// From here on one call takes less time than one for each.
constexpr std::int64_t kBatch = 4;

}  // namespace

Copies merge_runs(const std::int32_t* pages, std::int64_t n_pages, const std::int64_t* counts,
                  const std::int64_t* sources, const std::int64_t* regions, std::int64_t n_parts, std::int64_t base,
                  std::int64_t page_bytes, std::int64_t most) {
    Copies made;
    std::int64_t region = 0;
    std::int64_t at = 0;
    for (std::int64_t part = 0; part < n_parts; ++part) {
        if (counts[part] < 0 || counts[part] > n_pages - at)
            throw std::invalid_argument("parts have more pages than were given");
        for (std::int64_t i = 0; i < counts[part]; ++i, ++at) {
            const std::int64_t target = base + pages[at] * page_bytes, source = sources[part] + i * page_bytes;
            if (!made.sizes.empty() && region == regions[part] && made.targets.back() + made.sizes.back() == target &&
                made.sources.back() + made.sizes.back() == source && made.sizes.back() + page_bytes <= most) {
                made.sizes.back() += page_bytes;
                continue;
            }
            region = regions[part];
            made.targets.push_back(target);
            made.sources.push_back(source);
            made.sizes.push_back(page_bytes);
        }
    }
    if (at != n_pages) throw std::invalid_argument("parts have fewer pages than were given");
    return made;
}

int start_copies(const std::int64_t* targets, const std::int64_t* sources, const std::int64_t* sizes, std::int64_t n,
                 CopyFunction copy, BatchFunction batch, void* stream) {
    if (batch != nullptr && n >= kBatch) {
        std::vector<std::uint64_t> to(targets, targets + n), from(sources, sources + n);
        std::vector<std::size_t> bytes(sizes, sizes + n);
        CopyAttributes attributes{kInStreamOrder, {0, 0}, {0, 0}, 0};
        std::size_t first = 0, failed = 0;
        return batch(to.data(), from.data(), bytes.data(), bytes.size(), &attributes, &first, 1, &failed, stream);
    }
    for (std::int64_t i = 0; i < n; ++i) {
        const int status = copy(static_cast<std::uint64_t>(targets[i]),
                                reinterpret_cast<const void*>(static_cast<std::uintptr_t>(sources[i])),
                                static_cast<std::size_t>(sizes[i]), stream);
        if (status != 0) return status;
    }
    return 0;
}

}  // namespace hybridindex
