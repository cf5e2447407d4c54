#include "engine/driver_device.h"

#include "engine/driver_manners.h"

namespace pg_sdma {

CurrentDevice::CurrentDevice(const driver::Library& library, driver::Context context, int ordinal)
    : library_(library) {
  if (library_.vendor == driver::Vendor::kHip) {
    library_.must(library_.current_device, &before_);
    if (before_ == ordinal) return;
    library_.must(library_.set_device, ordinal);
  } else {
    driver::Context current = nullptr;
    library_.current_context(&current);
    if (current == context) return;
    library_.must(library_.push_context, context);
  }
  changed_ = true;
}

CurrentDevice::~CurrentDevice() {
  if (!changed_) return;
  if (library_.vendor == driver::Vendor::kHip) {
    library_.set_device(before_);
  } else {
    driver::Context popped = nullptr;
    library_.pop_context(&popped);
  }
}

void DriverDevice::fail(const char* call, int result) const {
  throw driver::Failure(result, library->explain(call, result) + " on " +
                                    driver::vendor_name(library->vendor) + " device " +
                                    std::to_string(ordinal));
}

bool DriverDevice::records(driver::Stream stream, bool unasked) const {
  int status = 0;
  const int result = library->is_capturing(stream, &status);
  if (result == driver::kStreamCaptureImplicit) return unasked;
  if (result != driver::kSuccess) fail(library->is_capturing.name, result);
  return status != 0;
}

}  // namespace pg_sdma
