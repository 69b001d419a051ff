#include "bindings/parts.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "mapping/row_pages.h"
#include "mapping/watch.h"

namespace nb = nanobind;

namespace hybridindex {
namespace {

std::int64_t* first_of(const InOut<std::int64_t, 1>& marks) {
    if (marks.shape(0) != 1) throw std::invalid_argument("marks must be one number");
    return marks.data();
}

// A watch and the array that it counts in.
class PyWatch {
public:
    PyWatch(std::uintptr_t address, std::size_t nbytes, int fd, const std::string& name, InOut<std::int64_t, 1> marks)
        : marks_(std::move(marks)), watch_(address, nbytes, fd, name, first_of(marks_)) {}

    std::vector<std::pair<std::int64_t, std::int64_t>> take_gone() { return watch_.take_gone(); }
    void clear() { watch_.clear(); }
    bool watching() const { return watch_.watching(); }

private:
    InOut<std::int64_t, 1> marks_;
    Watch watch_;
};

std::int64_t ask_for(In<std::uint8_t, 1> data, In<std::int64_t, 2> extents, std::int64_t row_bytes,
                     In<std::int64_t, 2> positions, bool rows, bool seen) {
    if (extents.shape(1) != 3) throw std::invalid_argument("extents must be (nlist, 3)");
    const MappedRows lists{data.data(), extents.data(), length(extents, 0), row_bytes};
    const nb::gil_scoped_release release;
    return ask_for_rows(lists, positions.data(), static_cast<std::int64_t>(positions.size()), rows, seen);
}

void count(InOut<std::int64_t, 1> marks) { __atomic_fetch_add(first_of(marks), 1, __ATOMIC_SEQ_CST); }

}  // namespace

void bind_watch(nb::module_& m) {
    nb::class_<PyWatch>(m, "Watch")
        .def(nb::init<std::uintptr_t, std::size_t, int, const std::string&, InOut<std::int64_t, 1>>(),
             nb::arg("address"), nb::arg("nbytes"), nb::arg("fd"), nb::arg("name"), nb::arg("marks").noconvert())
        .def("take_gone", &PyWatch::take_gone)
        .def("clear", &PyWatch::clear)
        .def_prop_ro("watching", &PyWatch::watching);
    m.def("count", &count, nb::arg("marks").noconvert());
    m.def("ask_for_rows", &ask_for, nb::arg("data").noconvert(), nb::arg("extents").noconvert(), nb::arg("row_bytes"),
          nb::arg("positions").noconvert(), nb::arg("rows"), nb::arg("seen"));
}

}  // namespace hybridindex
