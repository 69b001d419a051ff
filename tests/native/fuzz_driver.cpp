// Runs the fuzz target where libFuzzer does not: on random bytes, or on files.
//
//   fuzz_list_scan [--seconds S] [--seed N] [--callers C] [--check] [FILE...]
// --callers: as many threads scan at the same time. --check: the fixed checks only.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "fuzz.h"
#include "jobs/scan_items.h"
#include "simd/block_kernels.h"

using namespace hybridindex;

namespace {

// Every row of every probed list is in exactly one item, items of a query are counted, and none is much larger than
// its share.
void check_items(std::int64_t size, std::int64_t n, int threads, bool finish_early) {
    const std::int64_t dim = 64, code_size = 256;
    const std::int64_t extents[] = {0, 0, 0, size, size, 0, 5, 8, 0};
    std::vector<std::int64_t> probes;
    for (std::int64_t q = 0; q < n; ++q) probes.insert(probes.end(), {1 + q % 2, 0, 2 - q % 2});
    std::vector<std::int32_t> slot_of(3, -1), items_of_query;
    ProbedLists probed;
    group_probes(probes.data(), n, 3, extents, 3, slot_of, probed);
    REQUIRE((slot_of == std::vector<std::int32_t>(3, -1)));
    std::vector<ScanItem> items;
    make_items(probed, {extents, code_size, dim}, n, threads, finish_early, items, items_of_query);
    std::vector<std::vector<char>> seen{{}, std::vector<char>(static_cast<std::size_t>(size)), std::vector<char>(5)};
    std::int64_t hub_items = 0, largest = 0;
    for (const ScanItem& item : items) {
        const std::int64_t list = probed.lists[static_cast<std::size_t>(item.list)];
        REQUIRE(item.first % kBlockRows == 0 && item.count > 0);
        for (std::int64_t row = item.first; row < item.first + item.count; ++row)
            REQUIRE(!seen[static_cast<std::size_t>(list)].at(static_cast<std::size_t>(row))++);
        if (list != 1) continue;
        ++hub_items;
        largest = std::max<std::int64_t>(largest, item.count);
    }
    for (const auto& rows : seen) REQUIRE(std::count(rows.begin(), rows.end(), 0) == 0);
    for (const std::int32_t count : items_of_query) REQUIRE(count == static_cast<std::int32_t>(items.size()));
    if (size < 20000) return;
    if (threads > 1) REQUIRE(hub_items >= std::min<std::int64_t>(8 * threads, size * code_size / (64 << 10)));
    REQUIRE(largest <= 2 * (size / hub_items + kBlockRows));
}

void check_fixed() {
    for (const bool finish_early : {false, true})
        for (const int threads : {1, 2, 5, 64})
            for (const std::int64_t size : {1, 16, 17, 1000, 20000})
                for (const std::int64_t n : {1, 2, 64, 600}) check_items(size, n, threads, finish_early);
}

void run_random(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<std::uint8_t> bytes(256 + random() % 8192);
    for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random());
    // Exactly as much memory, so that the sanitizer sees the first byte beyond.
    const std::unique_ptr<std::uint8_t[]> data(new std::uint8_t[bytes.size()]);
    std::copy(bytes.begin(), bytes.end(), data.get());
    LLVMFuzzerTestOneInput(data.get(), bytes.size());
}

}  // namespace

int main(int argc, char** argv) {
    double seconds = 30;
    std::uint64_t seed = 1, last = 0;
    std::vector<std::string> files;
    for (int i = 1; i < argc; ++i) {
        const std::string name = argv[i];
        const auto value = [&] { return i + 1 < argc ? std::string(argv[++i]) : std::string("0"); };
        if (name == "--seconds") seconds = std::stod(value());
        else if (name == "--seed") seed = std::stoull(value()), last = seed + 1;
        else if (name == "--callers") callers = std::stoi(value());
        else if (name == "--check") seconds = 0;
        else files.push_back(name);
    }
    for (const std::string& file : files) {
        std::ifstream in(file, std::ios::binary);
        const std::vector<char> bytes{std::istreambuf_iterator<char>(in), {}};
        LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
    }
    if (!files.empty()) return 0;
    check_fixed();
    const auto start = std::chrono::steady_clock::now();
    std::uint64_t runs = 0;
    const auto over = [&] {
        const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
        return last != 0 ? seed >= last : spent.count() > seconds;
    };
    // A crash is repeated with --seed; FUZZ_VERBOSE=1 says which.
    for (; !over(); ++seed, ++runs) {
        if (std::getenv("FUZZ_VERBOSE") != nullptr)
            std::fprintf(stderr, "seed %llu\n", static_cast<unsigned long long>(seed));
        try {
            run_random(seed);
        } catch (const std::exception& error) {
            std::fprintf(stderr, "seed %llu: %s\n", static_cast<unsigned long long>(seed), error.what());
            return 1;
        }
    }
    std::printf("fuzz_list_scan: %llu inputs, %d callers, kernels %s: ok\n", static_cast<unsigned long long>(runs),
                callers, best_kernels().name);
    return 0;
}
