// SPDX-License-Identifier: Apache-2.0
#include "object.h"
#include <algorithm>
#include <cstring>

namespace kvbm_cxl {

namespace {

class ObjectPart : public StoragePart {
    struct Step {
        ObjectName name;
        std::vector<ObjectPiece> pieces;
    };

    std::shared_ptr<Core> core_;
    nixl_xfer_op_t operation_;
    std::vector<Step> steps_;

    Status transfer(const StopFlag& stop) override {
        Status result;
        for (const Step& step : steps_) {
            Status done = operation_ == NIXL_READ ? read_object(*core_, step.name, step.pieces, stop)
                                                  : publish_object(*core_, step.name, step.pieces, stop);
            // The first failure is reported. A READ without one of its parts is useless, so the rest is not started.
            if (!done.ok() && result.ok())
                result = done;
            if (!result.ok() && (operation_ == NIXL_READ || result.code() == NIXL_ERR_CANCELED))
                break;
        }
        return result;
    }

  public:
    ObjectPart(std::shared_ptr<Core> core, nixl_xfer_op_t operation) : core_(std::move(core)), operation_(operation) {}
    ~ObjectPart() override { cancel(); }

    Status take(const Pairs& pairs) {
        std::map<std::array<uint8_t, sizeof(cxl_shm_block_id_t)>, size_t> places;
        for (const Pair& pair : pairs) {
            auto* object = pair.remote->own ? dynamic_cast<const Object*>(pair.remote->own->extra.get()) : nullptr;
            if (!object)
                return {NIXL_ERR_NOT_SUPPORTED, "CXL: objects are reached by key from every agent: register the key with this agent, and "
                                                "name this agent as the remote one"};
            std::array<uint8_t, sizeof(cxl_shm_block_id_t)> id;
            std::memcpy(id.data(), &object->name.id, id.size());
            auto [place, is_new] = places.try_emplace(id, steps_.size());
            if (is_new)
                steps_.push_back({object->name, {}});
            steps_[place->second].pieces.push_back({local_piece(pair), pair.remote_address});
        }
        for (Step& step : steps_) {
            if (operation_ == NIXL_WRITE) {
                if (Status whole = check_whole(step.name, step.pieces); !whole.ok())
                    return whole;
            } else {
                std::sort(step.pieces.begin(), step.pieces.end(),
                          [](const auto& one, const auto& other) { return one.offset < other.offset; });
            }
        }
        return prepare(core_, pairs, "objects");
    }
};

} // namespace

Status make_object_part(const std::shared_ptr<Core>& core, nixl_xfer_op_t operation, Pairs pairs, std::unique_ptr<Part>& part) {
    auto made = std::make_unique<ObjectPart>(core, operation);
    if (Status taken = made->take(pairs); !taken.ok())
        return taken;
    part = std::move(made);
    return {};
}

} // namespace kvbm_cxl
