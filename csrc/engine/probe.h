// A test that a device's streams are independent.
#pragma once

#include "engine/driver_device.h"

namespace pg_sdma {

// Lets one stream wait and sees another go on. Throws CannotShare when the wait holds it up, and
// driver::Failure.
void probe_streams(const DriverDevice& device);

}  // namespace pg_sdma
