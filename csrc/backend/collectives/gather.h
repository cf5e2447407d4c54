// One call of the all-gather family.
#pragma once

#include <utility>
#include <vector>

#include "backend/collectives/collective.h"

namespace pg_sdma {

class Gather final : public Collective {
 public:
  enum class Form { kIntoTensor, kIntoTensorCoalesced, kList };

  // `outputs` and `inputs` are the call's own: one output a tensor for the into-tensor forms, one
  // output a rank for the list form. Reads no tensor's data: collectives before this one may still
  // write it. Bad arguments do not throw: they are in call.invalid, so that the peers can be told.
  Gather(Form form, int rank, int world, Tensors outputs, Tensors inputs,
         const c10d::AllgatherOptions& options);

  WorkPtr on_inner(c10d::Backend& inner) override;
  Results results() const override;
  size_t tensors() const override { return call.pieces.size(); }
  Call part(size_t first, size_t last) const override;
  void run(DirectTransport& transport, const Call& part, const Operation& operation) override;
  // On CPU one Work a tensor. As bytes, so that an operation that a late peer sent to the inner
  // works for every dtype: NCCL and gloo lack some.
  std::vector<WorkPtr> part_on_inner(c10d::Backend& inner, size_t first, size_t last) override;

 private:
  void add_tensors() override;
  void forget_tensors() override { call.pieces.clear(); }
  std::string check() const;
  void add_piece(size_t t);
  const char* name() const override;

  const Form form_;
  c10d::AllgatherOptions options_;
  Tensors readable_inputs_;  // the inputs, or contiguous copies
};

}  // namespace pg_sdma
