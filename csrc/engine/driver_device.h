// A device of the driver, as the parts of its engine share it.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <type_traits>

#include "engine/driver.h"

namespace pg_sdma {

struct DriverDevice {
  std::shared_ptr<const driver::Library> library;
  driver::Context context = nullptr;
  int ordinal = 0;
  // The calling thread's current stream on the device, as torch sees it.
  std::function<driver::Stream()> current_stream;
  // Whether copies that follow one another go out in one call, where the driver has it.
  bool batches_copies = false;

  driver::ContextGuard enter() const { return {*library, context}; }

  // Makes the call; throws driver::Failure naming it, the driver's reason and the device.
  template <class... Arguments>
  void must(const driver::Call<Arguments...>& call,
            std::type_identity_t<Arguments>... arguments) const {
    if (const int result = call(arguments...)) fail(call.name, result);
  }
  [[noreturn]] void fail(const char* call, int result) const {
    throw driver::Failure(
        result, library->explain(call, result) + " on CUDA device " + std::to_string(ordinal));
  }
};

}  // namespace pg_sdma
