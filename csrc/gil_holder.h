// The pybind11 holder of a backend: an intrusive_ptr whose last release does not hold the GIL.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>

namespace pg_sdma {

// A backend's destructor joins threads that may be waiting for the GIL. pybind11 destroys holders
// with the GIL held, so releasing it here is what keeps the two from waiting for each other.
// Laid out as one intrusive_ptr: torch's bindings read it as the holder of c10d::Backend.
template <class T>
class GilFreeHolder {
 public:
  using element_type = T;

  GilFreeHolder() = default;
  explicit GilFreeHolder(T* object)
      : pointer_(c10::intrusive_ptr<T>::unsafe_steal_from_new(object)) {}
  GilFreeHolder(c10::intrusive_ptr<T> pointer) : pointer_(std::move(pointer)) {}
  GilFreeHolder(const GilFreeHolder&) = default;
  GilFreeHolder(GilFreeHolder&&) = default;
  GilFreeHolder& operator=(const GilFreeHolder&) = default;
  GilFreeHolder& operator=(GilFreeHolder&&) = default;
  ~GilFreeHolder() {
    if (pointer_ && PyGILState_Check()) {
      pybind11::gil_scoped_release no_gil;
      pointer_.reset();
    }
  }

  T* get() const { return pointer_.get(); }

 private:
  c10::intrusive_ptr<T> pointer_;
};

}  // namespace pg_sdma

PYBIND11_DECLARE_HOLDER_TYPE(T, pg_sdma::GilFreeHolder<T>, true)
