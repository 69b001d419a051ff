// Arrays between Python and the kernels.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
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

// Hands a vector's memory to numpy without a copy.
template <typename T>
nanobind::object to_numpy(std::vector<T>&& values, std::initializer_list<std::size_t> shape) {
    auto* owned = new std::vector<T>(std::move(values));
    nanobind::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return nanobind::cast(nanobind::ndarray<nanobind::numpy, T>(owned->data(), shape, owner));
}

}  // namespace hybridindex
