// The vote's keys on the group's c10d store.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "transport/rendezvous.h"

namespace pg_sdma {

class StoreBoard final : public Board {
 public:
  // `cancelled` says why to wait no longer; empty: go on.
  StoreBoard(c10::intrusive_ptr<c10d::Store> store, std::function<std::string()> cancelled)
      : store_(std::move(store)), cancelled_(std::move(cancelled)) {}

  void post(const std::string& key, const std::string& value) override {
    store_->set("sdma/" + key, value);
  }

  // Asks again and again: a Store's own wait can neither be cancelled nor let another thread in.
  std::vector<std::string> collect(const std::vector<std::string>& keys,
                                   std::chrono::milliseconds timeout) override {
    std::vector<std::string> full;
    for (const std::string& key : keys) full.push_back("sdma/" + key);
    const auto deadline = Clock::now() + timeout;
    for (std::chrono::milliseconds pause{1}; !store_->check(full);
         pause = std::min(2 * pause, kMostPause)) {
      if (const std::string why = cancelled_(); !why.empty()) throw std::runtime_error(why);
      if (Clock::now() >= deadline) throw std::runtime_error(missing(full));
      std::this_thread::sleep_for(pause);
    }
    std::vector<std::string> values;
    for (const std::string& key : full) values.push_back(store_->get_to_str(key));
    return values;
  }

 private:
  static constexpr std::chrono::milliseconds kMostPause{50};

  std::string missing(const std::vector<std::string>& keys) {
    std::string names;
    for (const std::string& key : keys) {
      if (!store_->check({key})) names += (names.empty() ? "" : ", ") + key;
    }
    return "nothing came under " + names;
  }

  c10::intrusive_ptr<c10d::Store> store_;
  std::function<std::string()> cancelled_;
};

}  // namespace pg_sdma
