// Arrays between Python and the kernels, and when the interpreter is given away.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace hybridindex {

template <typename T, int Dim>
using In = nanobind::ndarray<const T, nanobind::ndim<Dim>, nanobind::c_contig, nanobind::device::cpu>;
template <typename T, int Dim>
using InOut = nanobind::ndarray<T, nanobind::ndim<Dim>, nanobind::c_contig, nanobind::device::cpu>;

// Signed, as the kernels count.
template <typename Array>
std::int64_t length(const Array& array, std::size_t axis) {
    return static_cast<std::int64_t>(array.shape(axis));
}

// Lets other threads have the interpreter, where the work is worth it: on few entries it takes less time than getting the
// interpreter back from a thread that took it meanwhile.
class Release {
public:
    explicit Release(std::int64_t entries) {
        if (entries > 4096) released_.emplace();
    }

private:
    std::optional<nanobind::gil_scoped_release> released_;
};

// A T whose end waits for threads that may have lost their cores: others have the interpreter meanwhile.
template <typename T>
class EndsUnlocked {
public:
    template <typename... Args>
    explicit EndsUnlocked(Args&&... args) : held_(std::make_unique<T>(std::forward<Args>(args)...)) {}
    ~EndsUnlocked() {
        const nanobind::gil_scoped_release release;
        held_.reset();
    }
    EndsUnlocked(const EndsUnlocked&) = delete;
    EndsUnlocked(EndsUnlocked&&) = delete;
    EndsUnlocked& operator=(const EndsUnlocked&) = delete;

    T* operator->() { return held_.get(); }
    const T* operator->() const { return held_.get(); }

private:
    std::unique_ptr<T> held_;
};

// Hands a vector's memory to numpy without a copy.
template <typename T>
nanobind::object to_numpy(std::vector<T>&& values, std::initializer_list<std::size_t> shape) {
    auto* owned = new std::vector<T>(std::move(values));
    nanobind::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return nanobind::cast(nanobind::ndarray<nanobind::numpy, T>(owned->data(), shape, owner));
}

template <typename T>
nanobind::object to_numpy(std::vector<T>&& values) {
    const std::size_t n = values.size();
    return to_numpy(std::move(values), {n});
}

}  // namespace hybridindex
