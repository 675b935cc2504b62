# SPDX-License-Identifier: Apache-2.0
"""How NIXL calls a backend that the plugin in this package was built for: the virtual functions of nixlBackendEngine, in order.

Names are as the C++ ABI mangles them, without the class: the part before the name says whether the function is const, the part after it
are the arguments. They are the same in NIXL 1.3.1 to 1.5.1.
"""

BASE = "17nixlBackendEngine"

_STRING = "NSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
_TRANSFER = f"ERK14nixl_xfer_op_tRK12nixlDescListI12nixlMetaDescES7_RK{_STRING}"

# (const, name, arguments) of every slot after the two destructors.
SLOTS = (
    (True, "supportsRemote", "Ev"),
    (True, "supportsLocal", "Ev"),
    (True, "supportsNotif", "Ev"),
    (True, "getSupportedMems", "Ev"),
    (False, "registerMem", "ERK12nixlBlobDescRK10nixl_mem_tRP13nixlBackendMD"),
    (False, "deregisterMem", "EP13nixlBackendMD"),
    (False, "connect", f"ERK{_STRING}"),
    (False, "disconnect", f"ERK{_STRING}"),
    (False, "unloadMD", "EP13nixlBackendMD"),
    (True, "prepXfer", f"{_TRANSFER}RP15nixlBackendReqHPK23nixlBackendOptionalArgs"),
    (True, "postXfer", f"{_TRANSFER}RP15nixlBackendReqHPK23nixlBackendOptionalArgs"),
    (True, "checkXfer", "EP15nixlBackendReqH"),
    (True, "releaseReqH", "EP15nixlBackendReqH"),
    (True, "prepMemView", "ERK12nixlDescListI18nixlRemoteMetaDescERPvPK23nixlBackendOptionalArgs"),
    (True, "prepMemView", "ERK12nixlDescListI12nixlMetaDescERPvPK23nixlBackendOptionalArgs"),
    (True, "releaseMemView", "EPv"),
    (True, "getPublicData", f"EPK13nixlBackendMDR{_STRING}"),
    (True, "getConnInfo", f"ER{_STRING}"),
    (False, "loadRemoteConnInfo", f"ERK{_STRING}S7_"),
    (False, "loadRemoteMD", f"ERK12nixlBlobDescRK10nixl_mem_tRK{_STRING}RP13nixlBackendMD"),
    (False, "loadLocalMD", "EP13nixlBackendMDRS1_"),
    (False, "getNotifs", f"ERSt6vectorISt4pairI{_STRING}S7_ESaIS8_EE"),
    (True, "genNotif", f"ERK{_STRING}S7_"),
    (
        True,
        "queryMem",
        f"ERK12nixlDescListI12nixlBlobDescERSt6vectorISt8optionalISt13unordered_mapI{_STRING}SD_"
        "St4hashISD_ESt8equal_toISD_ESaISt4pairIKSD_SD_EEEESaISN_EE",
    ),
    (
        True,
        "estimateXferCost",
        f"{_TRANSFER}RKP15nixlBackendReqHRNSt6chrono8durationIlSt5ratioILl1ELl1000000EEEESP_R11nixl_cost_tPK21nixlAgentOptionalArgs",
    ),
)
