// One call of the all-gather family, checked and taken apart: what the route looks at, what a
// transport carries, and how the inner would do the same.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backend/route.h"
#include "transport/transport.h"

namespace pg_sdma {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<std::vector<at::Tensor>>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// The whole of a call is in its tensors: Gather keeps them alive until it is dropped, and the
// addresses in `call` point into them.
class Gather : public std::enable_shared_from_this<Gather> {
 public:
  enum class Form { kIntoTensor, kIntoTensorCoalesced, kList };

  // `outputs` and `inputs` are the call's own: one output a tensor for the into-tensor forms, one
  // output a rank for the list form. Reads no tensor's data: collectives before this one may still
  // write it. Bad arguments do not throw: they are in call.invalid, so that the peers can be told.
  Gather(Form form, int rank, int world, Tensors outputs, Tensors inputs,
         const c10d::AllgatherOptions& options);

  Call call;
  CallFacts facts;
  bool async;
  c10d::OpType type;

  const Tensors& outputs() const { return outputs_; }
  // Of the tensors; the CPU when the call has none.
  at::Device device() const {
    return inputs_.empty() || !inputs_[0].defined() ? at::Device(at::kCPU) : inputs_[0].device();
  }

  // The same call on the inner, as the user made it.
  WorkPtr on_inner(c10d::Backend& inner);

  // Fills call.pieces, now that what was issued before has ended. What peers cannot read or this
  // rank cannot write as it lies goes through a stand-in. Does not throw: see call.invalid.
  void lay_out();

  // Tensors [first, last) as a call of their own, after lay_out().
  Call part(size_t first, size_t last) const;

  // The same tensors on the inner, after lay_out(); on CPU one Work a tensor. As bytes, so that an
  // operation that a late peer sent to the inner works for every dtype: NCCL and gloo lack some.
  std::vector<WorkPtr> part_on_inner(c10d::Backend& inner, size_t first, size_t last);

  // Copies what was gathered into stand-ins to where the user wanted it.
  void finish();

 private:
  std::string check() const;
  void add_piece(size_t t);
  void* landing(const at::Tensor& output);
  const char* name() const;

  Form form_;
  int rank_;
  int world_;
  Tensors outputs_;
  Tensors inputs_;
  c10d::AllgatherOptions options_;
  Tensors readable_inputs_;                                   // the inputs, or contiguous copies
  std::vector<std::pair<at::Tensor, at::Tensor>> stand_ins_;  // user's output, contiguous stand-in
};

}  // namespace pg_sdma
