// Coalesced all-gathers on an inner, whichever it is.
//
// gloo's end the process where tensors are not on the CPU: they read and write them as the host's
// memory (pytorch issue 152645). Its gathers of one tensor go through host copies, so there a call
// is issued tensor by tensor. The Work stands for the whole call.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "backend/collectives/collective.h"

namespace pg_sdma {

// `outputs`: one for each of `inputs`.
WorkPtr gather_into_tensors(c10d::Backend& inner, Tensors& outputs, Tensors& inputs,
                            const c10d::AllgatherOptions& options);

// `outputs`: a list a rank, of one tensor for each of `inputs`.
WorkPtr gather_into_lists(c10d::Backend& inner, TensorLists& outputs, Tensors& inputs,
                          const c10d::AllgatherOptions& options);

}  // namespace pg_sdma
