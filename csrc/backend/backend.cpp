#include "backend/backend.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <atomic>
#include <future>

namespace pg_sdma {

WorkPtr SdmaBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                     const c10d::AllgatherOptions& opts) {
  if (!group().settings.all_gathers) {
    return DelegatingBackend::_allgather_base(output, input, opts);
  }
  return all_gather(Gather::Form::kIntoTensor, {output}, {input}, opts);
}

WorkPtr SdmaBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                     const c10d::AllgatherOptions& opts) {
  if (!group().settings.all_gathers) {
    return DelegatingBackend::allgather_into_tensor_coalesced(outputs, inputs, opts);
  }
  return all_gather(Gather::Form::kIntoTensorCoalesced, outputs, inputs, opts);
}

WorkPtr SdmaBackend::allgather(TensorLists& outputs, Tensors& inputs,
                               const c10d::AllgatherOptions& opts) {
  // Several tensors a rank mean several devices a process, which only the inner may know.
  if (!group().settings.all_gathers || outputs.size() != 1 || inputs.size() != 1) {
    return DelegatingBackend::allgather(outputs, inputs, opts);
  }
  return all_gather(Gather::Form::kList, outputs[0], inputs, opts);
}

WorkPtr SdmaBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::ReduceScatterOptions& opts) {
  if (!group().settings.reduce_scatters) {
    return DelegatingBackend::_reduce_scatter_base(output, input, opts);
  }
  return reduce_scatter(ReduceScatter::Form::kTensor, {output}, {input}, opts);
}

WorkPtr SdmaBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                     const c10d::ReduceScatterOptions& opts) {
  if (!group().settings.reduce_scatters) {
    return DelegatingBackend::reduce_scatter_tensor_coalesced(outputs, inputs, opts);
  }
  return reduce_scatter(ReduceScatter::Form::kTensorCoalesced, outputs, inputs, opts);
}

WorkPtr SdmaBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                    const c10d::ReduceScatterOptions& opts) {
  // As for lists of all-gathers.
  if (!group().settings.reduce_scatters || outputs.size() != 1 || inputs.size() != 1) {
    return DelegatingBackend::reduce_scatter(outputs, inputs, opts);
  }
  return reduce_scatter(ReduceScatter::Form::kList, outputs, inputs[0], opts);
}

WorkPtr SdmaBackend::all_gather(Gather::Form form, const Tensors& outputs, const Tensors& inputs,
                                const c10d::AllgatherOptions& opts) {
  return run("all_gather", std::make_shared<Gather>(form, rank_, size_, outputs, inputs, opts),
             opts.timeout);
}

WorkPtr SdmaBackend::reduce_scatter(ReduceScatter::Form form, const Tensors& outputs,
                                    const Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  return run("reduce_scatter",
             std::make_shared<ReduceScatter>(form, rank_, size_, outputs, inputs, opts,
                                             group().settings.landing_bytes),
             opts.timeout);
}

WorkPtr SdmaBackend::run(const char* operation, std::shared_ptr<Collective> collective,
                         std::chrono::milliseconds timeout) {
  Lane& lane = collective->known() ? lane_for(operation, collective->device().type()) : main_lane();
  collective->facts.coalescing = coalescing_;
  if (timeout != c10d::kUnsetTimeout) collective->call.timeout = timeout;
  return keep(lane, lane.run(std::move(collective)));
}

std::vector<Stats::Row> SdmaBackend::stats() const {
  std::vector<Stats::Row> rows;
  for (const auto& [device, lane] : lanes()) {
    for (Stats::Row& row : lane->stats()) rows.push_back(std::move(row));
  }
  return rows;
}

std::map<std::string, std::string> SdmaBackend::ways() const {
  std::map<std::string, std::string> ways;
  for (const auto& [device, lane] : lanes()) {
    ways[c10::DeviceTypeName(device, /*lower_case=*/true)] = lane->way();
  }
  return ways;
}

void SdmaBackend::detach(const std::vector<SdmaBackend*>& backends) {
  // Side by side: a peer that has to hear that this rank is gone from one group may be late in
  // another.
  std::vector<std::future<void>> leaving;
  for (const SdmaBackend* const backend : backends) {
    for (const auto& each : backend->lanes()) {
      Lane& lane = *each.second;
      if (lane.forked()) continue;
      leaving.push_back(std::async([&lane] { lane.detach(); }));
    }
  }
  for (std::future<void>& each : leaving) each.get();
}

BackendPtr SdmaBackend::wrap(const StorePtr& store, const OptionsPtr& opts, const Inners& inners) {
  // Groups without a store of their own (a shrink) are told apart by how many came before.
  static std::atomic<int> derived{0};
  auto derived_group = std::make_shared<Group>(group());
  const auto& inner = inners.begin()->second;
  derived_group->settings.tuned.clear();  // measured for another number of ranks
  derived_group->rank = inner->getRank();
  derived_group->size = inner->getSize();
  if (opts && !opts->group_name.empty()) derived_group->name = opts->group_name;
  if (opts) derived_group->timeout = opts->timeout;
  derived_group->store = store;
  derived_group->settings.whole_job = false;
  derived_group->global_ranks.clear();  // which of this group's it has is the inner's to know
  if (!store) {
    derived_group->store = c10::make_intrusive<c10d::PrefixStore>(
        "derived" + std::to_string(derived++), group().store);
  }
  return c10::make_intrusive<SdmaBackend>(std::move(derived_group), inners);
}

}  // namespace pg_sdma
