// An inner whose operations return at once, for benchmarks/delegation.py.

#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <string>
#include <vector>

namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class NullInner final : public c10d::Backend {
 public:
  using Backend::Backend;

  const std::string getBackendName() const override { return "null"; }

  WorkPtr allreduce(Tensors&, const c10d::AllreduceOptions&) override { return work_; }
  WorkPtr _reduce_scatter_base(at::Tensor&, at::Tensor&,
                               const c10d::ReduceScatterOptions&) override {
    return work_;
  }
  WorkPtr broadcast(Tensors&, const c10d::BroadcastOptions&) override { return work_; }
  WorkPtr send(Tensors&, int, int) override { return work_; }
  WorkPtr barrier(const c10d::BarrierOptions&) override { return work_; }

 private:
  // One for all calls: making a Work costs the same with and without delegation.
  const WorkPtr work_ = c10::make_intrusive<c10d::Work>();
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::module_::import("torch._C._distributed_c10d");
  py::class_<NullInner, c10::intrusive_ptr<NullInner>, c10d::Backend>(module, "NullInner")
      .def(py::init<int, int>(), py::arg("rank"), py::arg("size"));
}
