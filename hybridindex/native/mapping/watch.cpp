#include "mapping/watch.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstring>
#include <mutex>

#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace hybridindex {
namespace {

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

constexpr int kSlots = 256;
// Ranges of a mapping that were found to be gone and not yet taken. More are told as one that covers some of them.
constexpr int kRanges = 64;

// What the handler knows of a mapping. It reads a slot only while `start` is not 0.
struct Slot {
    std::atomic<std::uintptr_t> start{0};
    std::uintptr_t nbytes = 0;
    int fd = -1;
    std::int64_t* marks = nullptr;
    char name[PATH_MAX] = {};
    // Pages that are gone: the first one in the upper half, how many in the lower; 0 where there is none.
    std::atomic<std::uint64_t> gone[kRanges] = {};
    std::atomic<bool> said{false};
};

Slot slots[kSlots];
std::atomic<int> handlers_inside{0};
std::mutex mutex;  // of those who watch; never the handler
int n_watches = 0;
bool installed = false;
struct sigaction before {};
std::uintptr_t page_bytes = 4096;

void say(const char* text) {
    const ssize_t ignored = write(STDERR_FILENO, text, std::strlen(text));
    static_cast<void>(ignored);
}

constexpr std::uint64_t pages_of(std::uint64_t first, std::uint64_t n) { return first << 32 | n; }

void add(Slot& slot, std::uint64_t first, std::uint64_t n) {
    for (std::atomic<std::uint64_t>& range : slot.gone) {
        std::uint64_t none = 0;
        if (range.compare_exchange_strong(none, pages_of(first, n))) return;
    }
    std::atomic<std::uint64_t>& range = slot.gone[kRanges - 1];
    std::uint64_t held = range.load(), wider = 0;
    do {
        const std::uint64_t begin = held == 0 ? first : std::min(first, held >> 32);
        const std::uint64_t end = std::max(first + n, (held >> 32) + (held & UINT32_MAX));
        wider = pages_of(begin, end - begin);
    } while (!range.compare_exchange_weak(held, wider));
}

// Whether the thread may go on. Calls nothing that is not safe in a signal's handler: mmap and madvise are plain system
// calls on Linux.
bool mend(Slot& slot, std::uintptr_t start, std::uintptr_t address) {
    const std::uintptr_t page = address / page_bytes * page_bytes;
    void* at = reinterpret_cast<void*>(page);
    // Another thread met the same page and has mended it, or it was put back.
    if (madvise(at, page_bytes, MADV_POPULATE_READ) == 0) return true;
    std::uintptr_t length = page_bytes;
    struct stat found {};
    const bool cut = fstat(slot.fd, &found) == 0 && static_cast<std::uintptr_t>(found.st_size) <= page - start;
    // The rest is gone as well: one mapping, not one for each page.
    if (cut) length = (start + slot.nbytes - page + page_bytes - 1) / page_bytes * page_bytes;
    if (mmap(at, length, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED) return false;
    add(slot, (page - start) / page_bytes, length / page_bytes);
    __atomic_fetch_add(slot.marks, 1, __ATOMIC_SEQ_CST);
    if (!slot.said.exchange(true)) {
        say("hybridindex: ");
        say(slot.name);
        say(cut ? " was cut while it is served; lists that were there are refused until it is whole again\n"
                : " cannot be read while it is served (see the kernel's log); lists that lie there are refused\n");
    }
    return true;
}

Slot* slot_of(std::uintptr_t address, std::uintptr_t& start) {
    for (Slot& slot : slots) {
        start = slot.start.load(std::memory_order_acquire);
        if (start != 0 && address >= start && address - start < slot.nbytes) return &slot;
    }
    return nullptr;
}

void handle(int signal, siginfo_t* info, void* context) {
    const int error = errno;
    handlers_inside.fetch_add(1);
    bool mended = false;
    // A signal that somebody sent has no address.
    if (info->si_code > 0) {
        const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
        std::uintptr_t start = 0;
        if (Slot* slot = slot_of(address, start)) mended = mend(*slot, start, address);
    }
    handlers_inside.fetch_sub(1);
    if (!mended) {
        if ((before.sa_flags & SA_SIGINFO) != 0 && before.sa_sigaction != nullptr) {
            before.sa_sigaction(signal, info, context);
        } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
            before.sa_handler(signal);
        } else {
            // A fault happens again when this returns; what was sent is sent again.
            sigaction(SIGBUS, &before, nullptr);
            if (info->si_code <= 0) raise(SIGBUS);
        }
    }
    errno = error;
}

bool ours(const struct sigaction& action) { return (action.sa_flags & SA_SIGINFO) != 0 && action.sa_sigaction == handle; }

// Where another handler came after ours, it calls ours; ours goes before it all the same.
void install() {
    struct sigaction now {};
    sigaction(SIGBUS, nullptr, &now);
    if (installed || ours(now)) return;
    before = now;
    struct sigaction action {};
    action.sa_sigaction = handle;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    installed = sigaction(SIGBUS, &action, nullptr) == 0;
}

void uninstall() {
    struct sigaction now {};
    sigaction(SIGBUS, nullptr, &now);
    // Who came after ours knows it: then it stays, and passes everything on.
    if (installed && ours(now) && sigaction(SIGBUS, &before, nullptr) == 0) installed = false;
}

}  // namespace

Watch::Watch(std::uintptr_t address, std::size_t nbytes, int fd, const std::string& name, std::int64_t* marks) {
    const std::lock_guard<std::mutex> lock(mutex);
    page_bytes = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    for (int i = 0; i < kSlots && slot_ < 0; ++i)
        if (slots[i].start.load() == 0) slot_ = i;
    if (slot_ < 0) return;
    Slot& slot = slots[slot_];
    slot.nbytes = nbytes;
    slot.fd = fd;
    slot.marks = marks;
    std::memset(slot.name, 0, sizeof(slot.name));
    std::strncpy(slot.name, name.c_str(), sizeof(slot.name) - 1);
    for (auto& range : slot.gone) range = 0;
    slot.said = false;
    slot.start.store(address, std::memory_order_release);
    ++n_watches;
    install();
}

Watch::~Watch() {
    if (slot_ < 0) return;
    const std::lock_guard<std::mutex> lock(mutex);
    slots[slot_].start.store(0);
    while (handlers_inside.load() != 0) {}
    if (--n_watches == 0) uninstall();
}

std::vector<std::pair<std::int64_t, std::int64_t>> Watch::take_gone() {
    std::vector<std::pair<std::int64_t, std::int64_t>> found;
    if (slot_ < 0) return found;
    Slot& slot = slots[slot_];
    for (auto& range : slot.gone) {
        const std::uint64_t held = range.exchange(0);
        if (held == 0) continue;
        const std::uint64_t first = (held >> 32) * page_bytes, last = first + (held & UINT32_MAX) * page_bytes;
        found.emplace_back(first, std::min<std::uint64_t>(last, slot.nbytes));
    }
    return found;
}

void Watch::clear() {
    take_gone();
    if (slot_ >= 0) slots[slot_].said = false;
}

}  // namespace hybridindex
