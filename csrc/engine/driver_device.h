// A device of the driver, as the parts of its engine share it.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <type_traits>

#include "engine/driver.h"

namespace pg_sdma {

// Makes a device the thread's current one for a scope, whatever the thread had.
class CurrentDevice {
 public:
  CurrentDevice(const driver::Library& library, driver::Context context, int ordinal);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  const driver::Library& library_;
  bool changed_ = false;
  int before_ = 0;  // HIP's, which has no contexts to push and pop
};

struct DriverDevice {
  std::shared_ptr<const driver::Library> library;
  driver::Context context = nullptr;  // of CUDA
  int ordinal = 0;
  // The calling thread's current stream on the device, as torch sees it.
  std::function<driver::Stream()> current_stream;
  // Streams that the tracks of a program spread over.
  size_t copy_streams = 1;

  CurrentDevice enter() const { return {*library, context, ordinal}; }

  // Makes the call; throws driver::Failure naming it, the driver's reason and the device.
  template <class... Arguments>
  void must(const driver::Call<Arguments...>& call,
            std::type_identity_t<Arguments>... arguments) const {
    if (const int result = call(arguments...)) fail(call.name, result);
  }
  // Whether `stream` is recording a graph. `unasked`: what to say of the default stream while
  // another one records, when it may not even be asked.
  bool records(driver::Stream stream, bool unasked) const;
  [[noreturn]] void fail(const char* call, int result) const;
};

}  // namespace pg_sdma
