// Python bindings of pg_sdma._C.

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>

#include <chrono>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "gil_holder.h"

namespace pg_sdma {
namespace {

using Settings = std::map<std::string, py::object>;
using StatsRow = std::tuple<std::string, std::string, std::string, int64_t, int64_t>;

c10::DeviceType device_type(const std::string& name) { return c10::Device(name).type(); }

GilFreeHolder<SdmaBackend> create(const StorePtr& store, int rank, int size,
                                  const std::map<std::string, BackendPtr>& inners,
                                  const py::dict& settings, const std::string& group_name,
                                  std::chrono::milliseconds timeout) {
  Inners by_device;
  for (const auto& [device, inner] : inners) by_device.emplace(device_type(device), inner);
  py::gil_scoped_release no_gil;
  return c10::make_intrusive<SdmaBackend>(rank, size, by_device);
}

// Names that the inner's Python class has and c10d.Backend has not, such as ProcessGroupNCCL's
// `options` or `register_mem_pool`. Python asks here only when the ordinary lookup found nothing.
py::object inner_attribute(const SdmaBackend& self, const std::string& name) {
  const BackendPtr inner = self.main_inner();
  const py::object wrapped = py::cast(inner);
  if (!py::hasattr(wrapped, name.c_str())) {
    throw py::attribute_error("neither the sdma backend nor its inner " + inner->getBackendName() +
                              " has an attribute '" + name + "'");
  }
  return wrapped.attr(name.c_str());
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  py::module_::import("torch._C._distributed_c10d");  // defines Backend and Store

  module.attr("torch_version") = PG_SDMA_BUILT_FOR_TORCH;

  py::class_<SdmaBackend, GilFreeHolder<SdmaBackend>, c10d::Backend>(module, "SdmaBackend")
      .def(py::init(&create), py::arg("store"), py::arg("rank"), py::arg("size"),
           py::arg("inners"), py::arg("settings"), py::arg("group_name"), py::arg("timeout"))
      .def(
          "inner",
          [](const SdmaBackend& self, const std::string& device) {
            return self.inner(device_type(device));
          },
          py::arg("device_type"))
      .def("stats", [](const SdmaBackend&) { return std::vector<StatsRow>(); })
      .def("__getattr__", &inner_attribute);
}

}  // namespace pg_sdma
