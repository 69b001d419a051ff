// Mapped files whose bytes may go while they are read: a file that somebody cut, a disk that fails. The system then
// sends SIGBUS to whoever reads. For a watched mapping a handler says which file it is, puts zeros in the place of what
// is gone, and counts: whoever reads must look at the count before using what it read.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace hybridindex {

// The handler is installed while there is a watch. A SIGBUS that is none of ours goes to the handler before it.
class Watch {
public:
    // `marks` is counted up by one for each fault, and outlives the watch. `fd` is of the mapped file and stays open;
    // it is mapped from its beginning. Where too many mappings are watched already, this one is not.
    Watch(std::uintptr_t address, std::size_t nbytes, int fd, const std::string& name, std::int64_t* marks);
    // Returns when no handler uses it any more.
    ~Watch();
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;

    // Whether there was room for it.
    bool watching() const { return slot_ >= 0; }
    // Bytes [first, second) that turned out to be gone, and hold zeros, since this was asked last.
    std::vector<std::pair<std::int64_t, std::int64_t>> take_gone();
    // All bytes are there again.
    void clear();

private:
    int slot_ = -1;
};

}  // namespace hybridindex
