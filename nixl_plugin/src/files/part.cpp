// SPDX-License-Identifier: Apache-2.0
#include "file.h"

namespace kvbm_cxl {

namespace {

class FilePart : public StoragePart {
    struct Step {
        const File* file;
        uint64_t offset;
        LocalPiece piece;
    };

    std::shared_ptr<Core> core_;
    nixl_xfer_op_t operation_;
    std::vector<Step> steps_;
    std::vector<std::shared_ptr<Registration>> files_; // as long as the steps name them

    Status transfer(const StopFlag& stop) override {
        for (const Step& step : steps_) {
            Status done =
                operation_ == NIXL_READ ? step.file->read(step.offset, step.piece, stop) : step.file->write(step.offset, step.piece, stop);
            if (!done.ok())
                return done;
            core_->counters.add(operation_ == NIXL_READ ? CXL_SHM_COUNT_NIXL_FILE_READ_BYTES : CXL_SHM_COUNT_NIXL_FILE_WRITTEN_BYTES,
                                step.piece.len_bytes);
        }
        return {};
    }

  public:
    FilePart(std::shared_ptr<Core> core, nixl_xfer_op_t operation) : core_(std::move(core)), operation_(operation) {}
    ~FilePart() override { cancel(); }

    Status take(const Pairs& pairs) {
        for (const Pair& pair : pairs) {
            auto* file = pair.remote->own ? dynamic_cast<const File*>(pair.remote->own->extra.get()) : nullptr;
            if (!file)
                return {NIXL_ERR_NOT_SUPPORTED,
                        "CXL: files are reached by the agent that registered them only: name this agent as the remote one"};
            if (files_.empty() || files_.back() != pair.remote->own)
                files_.push_back(pair.remote->own);
            steps_.push_back({file, pair.remote_address, local_piece(pair)});
        }
        return prepare(core_, pairs, "files");
    }
};

} // namespace

Status make_file_part(const std::shared_ptr<Core>& core, nixl_xfer_op_t operation, Pairs pairs, std::unique_ptr<Part>& part) {
    auto made = std::make_unique<FilePart>(core, operation);
    if (Status taken = made->take(pairs); !taken.ok())
        return taken;
    part = std::move(made);
    return {};
}

} // namespace kvbm_cxl
