// One call of the reduce-scatter family.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "backend/collectives/collective.h"
#include "backend/collectives/device_reducer.h"
#include "backend/collectives/host_reducer.h"

namespace pg_sdma {

class ReduceScatter final : public Collective {
 public:
  enum class Form { kTensor, kTensorCoalesced, kList };

  // `outputs` and `inputs` are the call's own: one input a tensor for the tensor forms, one input a
  // rank for the list form. Reads no tensor's data: collectives before this one may still write it.
  // Bad arguments do not throw: they are in call.invalid, so that the peers can be told.
  // `landing_bytes`: memory that the call may use for what it takes from the peers.
  ReduceScatter(Form form, int rank, int world, Tensors outputs, Tensors inputs,
                const c10d::ReduceScatterOptions& options, size_t landing_bytes);

  WorkPtr on_inner(c10d::Backend& inner) override;
  void get_ready() override;
  size_t tensors() const override { return call.shares.size(); }
  Call part(size_t first, size_t last) const override;
  void run(DirectTransport& transport, const Call& part, const Operation& operation) override;
  // Of CPU tensors, the inner only moves the slices, all of them at once, and they are summed here:
  // so the result has the same bits as on the direct route. Of device tensors it is the inner's
  // sum.
  std::vector<WorkPtr> part_on_inner(c10d::Backend& inner, size_t first, size_t last) override;
  void followed_by(c10::Stream stream) override;
  void finish() override;

 private:
  void add_tensors() override;
  void forget_tensors() override;
  void make_reducer(const Reduction& reduction);
  bool aligned(size_t t) const;
  std::vector<WorkPtr> whole_part_on_inner(c10d::Backend& inner, size_t first, size_t last);
  std::string unsupported() const;
  std::string check() const;
  void add_share(size_t t);
  // Peers read the inputs while this rank writes its outputs: an output may lie in its own slice's
  // place, and inputs that it meets elsewhere are read from a copy.
  void keep_apart();
  void point_slices();
  size_t input_of(size_t tensor, int rank) const;
  const char* name() const override;

  const Form form_;
  c10d::ReduceScatterOptions options_;
  const size_t landing_bytes_;
  Tensors readable_inputs_;  // the inputs, or contiguous copies
  std::unique_ptr<HostReducer> reducer_;
  std::vector<DeviceReducer::Tensor> kernels_;  // one a tensor, of device tensors
  std::unique_ptr<DeviceReducer> device_reducer_;
  std::vector<std::pair<size_t, at::Tensor>> received_;  // share, and its slices from all ranks
};

}  // namespace pg_sdma
