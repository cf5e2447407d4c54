// All-gathers that are written in Python: what transport/external_all_gather.h asks of one, as
// calls of an object.
#pragma once

#include <c10/core/Device.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "transport/external_all_gather.h"

namespace pg_sdma {

// Over a pg_sdma.mori_transport.Offer, which makes a MoriGather. With the GIL held; what it returns
// takes the GIL by itself, and waits for nobody with it.
std::shared_ptr<ExternalOffer> python_offer(const py::object& offer, c10::Device device);

}  // namespace pg_sdma
