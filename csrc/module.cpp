// Python bindings of pg_sdma._C.

#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <pybind11/chrono.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "backend/collectives/device_reducer.h"
#include "backend/collectives/kernels.h"
#include "engine/inject.h"
#include "gil_holder.h"
#include "python_all_gather.h"
#include "transport/schedule/staged.h"

namespace pg_sdma {
namespace {

template <class T>
std::optional<T> optional_of(const py::dict& settings, const char* name) {
  if (!settings.contains(name) || settings[name].is_none()) return std::nullopt;
  return settings[name].cast<T>();
}

c10::DeviceType device_type(const std::string& name) { return c10::Device(name).type(); }

std::vector<c10::DeviceType> device_types(const std::vector<std::string>& names) {
  std::vector<c10::DeviceType> types;
  for (const std::string& name : names) types.push_back(device_type(name));
  return types;
}

TunedBounds read_bounds(const py::dict& dict) {
  return {optional_of<uint64_t>(dict, "min_bytes"), optional_of<uint64_t>(dict, "min_sum_bytes"),
          optional_of<uint64_t>(dict, "min_mean_bytes"),
          optional_of<std::string>(dict, "text").value_or("")};
}

// Of what _C.pyi lists; what is absent keeps its default.
Settings read_settings(const py::dict& dict) {
  Settings settings;
  settings.enabled = optional_of<bool>(dict, "enabled").value_or(settings.enabled);
  if (const auto operations = optional_of<std::vector<std::string>>(dict, "ops")) {
    const auto has = [&](const char* name) {
      return std::find(operations->begin(), operations->end(), name) != operations->end();
    };
    settings.all_gathers = has("all_gather");
    settings.reduce_scatters = has("reduce_scatter");
  }
  settings.no_device_sums = optional_of<std::string>(dict, "no_device_sums").value_or("");
  settings.landing_bytes =
      optional_of<uint64_t>(dict, "landing_bytes").value_or(settings.landing_bytes);
  settings.min_bytes = optional_of<uint64_t>(dict, "min_bytes");
  if (const auto tuned = optional_of<std::map<std::string, py::dict>>(dict, "tuned")) {
    for (const auto& [device, bounds] : *tuned) {
      settings.tuned.emplace(device_type(device), read_bounds(bounds));
    }
  }
  settings.patience_ms = optional_of<double>(dict, "patience_ms");
  settings.slots = optional_of<std::string>(dict, "transport").value_or("auto") != "peer";
  settings.defer = optional_of<std::string>(dict, "late").value_or("direct") != "inner";
  if (const auto devices = optional_of<std::vector<std::string>>(dict, "peer_copies_on")) {
    settings.peer_copies_on = device_types(*devices);
  }
  if (const auto devices = optional_of<std::vector<std::string>>(dict, "mori_on")) {
    settings.mori_on = device_types(*devices);
  }
  settings.no_mori = optional_of<std::string>(dict, "no_mori").value_or("");
  settings.mori_bytes = optional_of<uint64_t>(dict, "mori_bytes").value_or(settings.mori_bytes);
  settings.whole_job = optional_of<bool>(dict, "whole_job").value_or(settings.whole_job);
  settings.strict = optional_of<bool>(dict, "strict").value_or(settings.strict);
  settings.let_peers_read = optional_of<bool>(dict, "ptracer").value_or(settings.let_peers_read);
  settings.ring = optional_of<uint64_t>(dict, "ring").value_or(settings.ring);
  settings.allow_same_device =
      optional_of<bool>(dict, "allow_same_device").value_or(settings.allow_same_device);
  settings.allow_pcie = optional_of<bool>(dict, "allow_pcie").value_or(settings.allow_pcie);
  settings.hip = optional_of<bool>(dict, "hip").value_or(settings.hip);
  settings.driver = optional_of<std::string>(dict, "driver").value_or(settings.driver);
  settings.trace_entries = optional_of<uint64_t>(dict, "trace_entries").value_or(0);
  settings.trace_file = optional_of<std::string>(dict, "trace_file").value_or("");
  settings.agreed = optional_of<std::string>(dict, "agreed").value_or(settings.agreed);
  return settings;
}

GilFreeHolder<SdmaBackend> create(const StorePtr& store, int rank, int size,
                                  const std::map<std::string, BackendPtr>& inners,
                                  const py::dict& settings, const std::string& group_name,
                                  std::chrono::milliseconds timeout,
                                  const std::vector<int>& global_ranks) {
  inject::configure(optional_of<std::string>(settings, "inject").value_or(""));
  auto group = std::make_shared<Group>();
  group->rank = rank;
  group->size = size;
  group->name = group_name;
  group->store = store;
  group->settings = read_settings(settings);
  group->timeout = timeout;
  group->global_ranks = global_ranks;
  Inners by_device;
  for (const auto& [device, inner] : inners) by_device.emplace(device_type(device), inner);
  py::gil_scoped_release no_gil;
  return c10::make_intrusive<SdmaBackend>(std::move(group), by_device);
}

// Asks Python for a kernel. Called without the GIL.
std::optional<kernels::Kernel> compile_with(const py::function& compile, const kernels::Key& key) {
  py::gil_scoped_acquire gil;
  try {
    const py::object found = compile(key.device, c10::toString(key.type), key.world, key.rank,
                                     static_cast<int>(key.kind), key.aligned);
    if (found.is_none()) return std::nullopt;
    const auto [function, threads, shared_bytes, blocks, registers] =
        found.cast<std::tuple<uintptr_t, unsigned, unsigned, unsigned, int>>();
    return kernels::Kernel{reinterpret_cast<void*>(function), threads, shared_bytes, blocks};
  } catch (const std::exception& error) {
    // Without what belongs to Python, which must not be dropped without the GIL.
    throw std::runtime_error(error.what());
  }
}

// Asks Python for a rank's part in mori's all-gathers. Called without the GIL.
std::shared_ptr<ExternalOffer> offer_with(const py::function& make, const Group& group,
                                          c10::Device device) {
  py::gil_scoped_acquire gil;
  try {
    return python_offer(make(device.str(), group.name, group.rank, group.size,
                             group.settings.whole_job, group.settings.mori_bytes),
                        device);
  } catch (const std::exception& error) {
    throw std::runtime_error(error.what());  // as above
  }
}

// The static rule, for its test.
std::string static_rule(uint64_t total_bytes, uint32_t tensors, bool even, bool coalescing,
                        bool capturing, const std::string& unsupported, bool sums,
                        const std::string& why_no_transport, const std::string& why_no_sums,
                        uint64_t min_bytes, uint64_t min_sum_bytes, uint64_t min_mean_bytes) {
  return static_refusal({total_bytes, tensors, even, coalescing, capturing, unsupported, sums},
                        {why_no_transport, why_no_sums, min_bytes, min_sum_bytes, min_mean_bytes});
}

// Bytes of a slot of shared memory in a group of CPU tensors; 0: so many ranks have none.
size_t slot_bytes(int world, uint64_t ring) {
  return StagingBuffers::shape(world, ControlPage::bytes(world, ring)).bytes;
}

// (bytes of each peer's slice that land at a time, landings) of a reduce-scatter of GPU tensors,
// for its test.
std::pair<size_t, int> shape_of_landings(size_t slice_bytes, size_t most_bytes, size_t peers) {
  const LandingShape shape = landing_shape(slice_bytes, most_bytes, peers);
  return {shape.room, shape.count};
}

// Names that the inner's Python class has and c10d.Backend has not, such as ProcessGroupNCCL's
// `options` or `register_mem_pool`. Python asks here only when the ordinary lookup found nothing.
py::object inner_attribute(const SdmaBackend& self, const std::string& name) {
  const BackendPtr inner = self.main_inner();
  try {
    return py::cast(inner).attr(name.c_str());
  } catch (const py::error_already_set& error) {
    if (!error.matches(PyExc_AttributeError)) throw;
    throw py::attribute_error("neither the sdma backend nor its inner " + inner->getBackendName() +
                              " has an attribute '" + name + "'");
  }
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  py::module_::import("torch._C._distributed_c10d");  // defines Backend and Store

  module.attr("torch_version") = PG_SDMA_BUILT_FOR_TORCH;

  module.def(
      "set_log",
      [](py::function log) {
        // Leaked on purpose: groups may log until the interpreter is gone.
        auto* kept = new py::function(std::move(log));
        set_log([kept](const std::string& line, const std::string& warning) {
          py::gil_scoped_acquire gil;
          (*kept)(line, warning);
        });
      },
      py::arg("log"));

  module.def(
      "set_kernels",
      [](py::function compile) {
        // Leaked on purpose, as above.
        auto* kept = new py::function(std::move(compile));
        kernels::set_compiler([kept](const kernels::Key& key) { return compile_with(*kept, key); });
      },
      py::arg("compile"));

  module.def(
      "set_mori",
      [](py::function make) {
        // Leaked on purpose, as above.
        auto* kept = new py::function(std::move(make));
        set_mori([kept](const Group& group, c10::Device device) {
          return offer_with(*kept, group, device);
        });
      },
      py::arg("make"));

  module.def("_flight_record", &flight_record::json, py::arg("rank"), py::arg("reason"),
             py::call_guard<py::gil_scoped_release>());

  module.def("_static_refusal", &static_rule, py::kw_only(), py::arg("total_bytes"),
             py::arg("tensors") = 1, py::arg("even") = true, py::arg("coalescing") = false,
             py::arg("capturing") = false, py::arg("unsupported") = "", py::arg("sums") = false,
             py::arg("why_no_transport") = "", py::arg("why_no_sums") = "",
             py::arg("min_bytes") = 0, py::arg("min_sum_bytes") = 0, py::arg("min_mean_bytes") = 0);

  module.def("_landing_shape", &shape_of_landings, py::arg("slice_bytes"), py::arg("most_bytes"),
             py::arg("peers"));
  module.def("_slot_bytes", &slot_bytes, py::arg("world"), py::arg("ring"));

  py::class_<SdmaBackend, GilFreeHolder<SdmaBackend>, c10d::Backend>(module, "SdmaBackend",
                                                                     py::is_final())
      .def(py::init(&create), py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("inners"),
           py::arg("settings"), py::arg("group_name"), py::arg("timeout"),
           py::arg("global_ranks") = std::vector<int>())
      .def(
          "inner",
          [](const SdmaBackend& self, const std::string& device) {
            return self.inner(device_type(device));
          },
          py::arg("device_type"))
      .def("stats", &SdmaBackend::stats, py::call_guard<py::gil_scoped_release>())
      .def("transports", &SdmaBackend::ways, py::call_guard<py::gil_scoped_release>())
      // As torch's own backends have it, whose users reach past the group.
      .def("_set_default_timeout", &SdmaBackend::setTimeout, py::arg("timeout"),
           py::call_guard<py::gil_scoped_release>())
      .def("__getattr__", &inner_attribute);

  module.def("detach", &SdmaBackend::detach, py::arg("backends"),
             py::call_guard<py::gil_scoped_release>());
}

}  // namespace pg_sdma
