#include "engine/driver.h"

#include <dlfcn.h>
#include <link.h>

#include <cstring>

namespace pg_sdma::driver {
namespace {

template <class... Arguments>
void find(void* library, const char* name, Call<Arguments...>& call) {
  call.name = name;
  call.function = reinterpret_cast<int (*)(Arguments...)>(dlsym(library, name));
}

template <class... Arguments>
void require(const Call<Arguments...>& call) {
  if (call.function == nullptr) {
    throw std::runtime_error(std::string("the driver has no ") + call.name + ": it is too old");
  }
}

// The library of that name that this process has loaded already, whatever version is behind the
// name: torch's ROCm wheels bring HIP along, and a second HIP in one process is another device.
std::string loaded(const char* name) {
  struct Search {
    const char* name;
    std::string path;
  } search{name, ""};
  const auto look = [](dl_phdr_info* info, size_t, void* data) {
    auto& [name, path] = *static_cast<Search*>(data);
    const char* slash = std::strrchr(info->dlpi_name, '/');
    const char* file = slash == nullptr ? info->dlpi_name : slash + 1;
    if (std::strncmp(file, name, std::strlen(name)) == 0) path = info->dlpi_name;
    return path.empty() ? 0 : 1;
  };
  dl_iterate_phdr(look, &search);
  return search.path;
}

std::string library_of(Vendor vendor) {
  if (vendor == Vendor::kCuda) return "libcuda.so.1";
  const std::string hip = loaded("libamdhip64.so");
  return hip.empty() ? "libamdhip64.so" : hip;
}

}  // namespace

std::shared_ptr<const Library> Library::open(Vendor vendor, const std::string& path) {
  const bool hip = vendor == Vendor::kHip;
  const std::string name = path.empty() ? library_of(vendor) : path;
  // Never closed: the driver owns threads, and torch uses it to the end of the process.
  void* opened = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (opened == nullptr) {
    throw std::runtime_error(std::string("the driver cannot be opened: ") + dlerror());
  }
  std::shared_ptr<Library> library(new Library(vendor));
#define PG_SDMA_FIND_EITHER(member, cuda, hip_name, ...) \
  find(opened, hip ? #hip_name : #cuda, library->member);
#define PG_SDMA_FIND(member, name, ...) find(opened, #name, library->member);
#define PG_SDMA_REQUIRE(member, ...) require(library->member);
  PG_SDMA_DRIVER_CALLS(PG_SDMA_FIND_EITHER)
  PG_SDMA_DRIVER_CALLS(PG_SDMA_REQUIRE)
  if (hip) {
    PG_SDMA_HIP_CALLS(PG_SDMA_FIND)
    PG_SDMA_HIP_CALLS(PG_SDMA_REQUIRE)
  } else {
    PG_SDMA_CUDA_CALLS(PG_SDMA_FIND)
    PG_SDMA_OPTIONAL_CUDA_CALLS(PG_SDMA_FIND)
    PG_SDMA_CUDA_CALLS(PG_SDMA_REQUIRE)
  }
#undef PG_SDMA_FIND_EITHER
#undef PG_SDMA_FIND
#undef PG_SDMA_REQUIRE
  library->must(library->init, 0);
  return library;
}

std::string Library::explain(const char* call, int result) const {
  const char* text = nullptr;
  if (error_text(result, &text) != kSuccess || text == nullptr) text = "unknown error";
  return std::string(call) + ": " + text + " (error " + std::to_string(result) + ")";
}

}  // namespace pg_sdma::driver
