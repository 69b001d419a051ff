// Scratch memory that grows and is used again. What is in it is not kept.
#pragma once
#include <cstddef>
#include <cstring>
#include <memory>
#include <new>

namespace hybridindex {

// Starts at a multiple of 64 bytes: registers and tiles are read fastest there.
template <typename T>
class AlignedBuffer {
public:
    T* data() { return data_.get(); }
    const T* data() const { return data_.get(); }
    T& operator[](std::ptrdiff_t i) { return data_.get()[i]; }

    // Filled with zeros when it grows.
    void grow(std::ptrdiff_t size) {
        if (size <= size_) return;
        const std::size_t nbytes = static_cast<std::size_t>(size) * sizeof(T);
        data_.reset(static_cast<T*>(::operator new[](nbytes, kAlignment)));
        std::memset(data_.get(), 0, nbytes);
        size_ = size;
    }

    // Lets go of it all where that is more than `most` bytes.
    void let_go(std::size_t most) {
        if (static_cast<std::size_t>(size_) * sizeof(T) > most) data_.reset(), size_ = 0;
    }

private:
    static constexpr std::align_val_t kAlignment{64};
    struct Free {
        void operator()(T* data) const { ::operator delete[](data, kAlignment); }
    };
    std::unique_ptr<T[], Free> data_;
    std::ptrdiff_t size_ = 0;
};

}  // namespace hybridindex
