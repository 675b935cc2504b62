// SPDX-License-Identifier: Apache-2.0
// Global lock + manager seats + fenced commits. Body A: host-owned records (write-then-check). Body B: handed-over line (chunk owner).
#include "mc.h"
#include <map>
enum {NOH=7};
struct G{u8 tag,g,h,inc,rs,rep,rec;};           // grant line: tag=manager epoch, g=grant no, rec=recall
struct Q{u8 inc,rs,want,clean;};                // request line
struct R{u8 g,ver,inc;};                            // protected record (class A) of a host
struct Cl{u8 pc,i,inc,rs,tag,g,mk,rep,kind,bg,bv,ops,reqs;};
struct Mg{u8 pc,i,e,free,wh,winc,wrs; G a; u8 late,hid;};   // hid = copies that did not verify when they were collected
struct S{ u8 seat[3],fen[3][3]; G gr[3]; Q rq[3]; R rec[3]; u8 intent[3]; u8 ch,cinc,cg; Cl cl[3]; Mg mg[3];
  u8 dead,claims,fences,crashes,rejoins,cancels; u8 acc[8]; u8 rdG,rdbg,rdbv,cmax,cmask; u8 own[3]; u8 bad; u8 reads,rpc,ri,rg,rv,rw,rinc; u8 dmg,dseat,dgr; };   // dseat, dgr: lines that do not verify; their last good content stays in seat[] and gr[]
struct C{ int K=2,N=3,seats=3,clients=6,S=0,B=0,claims=2,fences=1,crashes=1,rejoins=1,reqs=1,ops=1,cancels=0,sticky=0,reads=0,dmg=0,old=0; std::map<std::string,int> d; std::map<std::string,int> hit; } c;
static bool D(const char*s){ static std::map<const void*,bool> m; auto it=m.find(s); if(it!=m.end())return it->second; return m[s]=c.d.count(s)>0; }
static int GI(int k){ return D("shared_grant_line")?0:k; }
static bool fencedAny(const S&s,int h,int inc){ for(int k=0;k<c.K;k++) if(s.fen[k][h]>=inc) return true; return false; }
static int maxfen(const S&s,int h){int m=0; for(int k=0;k<c.K;k++) if(s.fen[k][h]>m)m=s.fen[k][h]; return m;}
static bool seatBad(const S&s,int k){ return s.dseat>>k&1; }
static bool grBad(const S&s,int k){ return s.dgr>>GI(k)&1; }
static int badOf(const S&s){ if(s.bad) return s.bad;
  int n=0,z=0; for(int h=0;h<c.N;h++) if((c.clients>>h&1) && !(s.dead>>h&1)){ int p=s.cl[h].pc; bool hold=(p>=3&&p<=7)||(p>=30&&p<=36); if(hold){ z++; if(!fencedAny(s,h,s.cl[h].inc)) n++; } }
  if(n>1) return 10; if(c.S&&z>1) return 11; return 0; }
static const char* badName(int b){ switch(b){case 1:return "two different holders accepted for one grant number";case 2:return "write of a fenced holder resurrected after it was read as absent";
 case 3:return "lost/duplicated commit (two confirmed commits of one version)";case 4:return "confirmed commit lost (a later holder read the state without it)";case 5:return "resource owned twice";case 6:return "stale manager's grant accepted, unknown to a newer manager that finished its collect";case 7:return "commit confirmed on a state older than a confirmed one";
 case 8:return "lock-free reader accepted a value a later holder did not see";case 10:return "two valid (unfenced) holders";case 11:return "two holders (safe-wait mode, zombies count)";case 20:return "no progress";}return "?";}
enum{L_REQ=0,L_CANCEL,L_POLL,L_CHKSEAT,L_ACC,L_REL,L_NOTICE,L_COL,L_SEAL,L_WRITE,L_CHKFEN,L_CONF,L_REJOIN,L_CRASH,L_REBOOT,L_TO,L_RDSEAT,L_CLAIM,L_COLM,L_ADOPT,L_SCANH,L_SUSP,L_SEEF,L_PROOF,L_SCANW,L_GRANT,L_STEP,L_RECALL,L_INTQ,L_RDC,L_INT,L_WC,L_CLR,L_SELF,L_STARTOP,L_READER,L_DAMAGE,L_HEAL,L_HIDDEN,L_NL};
static const char* LN[]={"request","cancel","poll:sees grant","check seat","ACCEPT","release","notices fence","collect rec","publish SEAL","publish RECORD","check fence row","CONFIRMED","rejoin","CRASH","reboot","start takeover","read seat","CLAIM epoch","collect grants","ADOPT (publish)","scan holder req","SUSPECT+FENCE","sees fence","proof of death","scan waiter","GRANT","step down","recall","read intents","read chunk line","publish intent","WRITE chunk line","clear intent","self grant shortcut","start op","lock-free reader","DAMAGE","owner writes its line again","seat of a hidden copy"};
static void resetCl(Cl&x){x.i=x.tag=x.g=x.mk=x.rep=x.kind=x.bg=x.bv=0;}
static bool gmatch(const S&s,int k,int h,const Cl&x){ if(grBad(s,k)) return false; const G&g=s.gr[GI(k)]; return g.h==h&&g.tag&&(D("no_incarnation")||g.inc==x.inc)&&(D("no_reqno")||g.rs==x.rs); }
static void accept(S&n,int h){ Cl&x=n.cl[h]; x.pc=3; x.i=0; u8 v=1+h+4*x.inc; if(x.g<8){ if(n.acc[x.g]&&n.acc[x.g]!=v) n.bad=1; n.acc[x.g]=v; }
  for(int k=0;k<c.K;k++){ const Mg&m=n.mg[k]; if(m.pc>=6&&m.pc<=8&&m.e>x.tag&&!(n.dead>>k&1)){ const G&a=m.pc==6?m.a:n.gr[k]; if(!D("shared_grant_line")&&!D("_late_only")&&(a.g<x.g||(a.g==x.g&&(a.h!=h||a.inc!=x.inc)))) n.bad=6; } } }
static void readDone(S&n,const Cl&x,int g,int bg,int bv){ if(bg>g) return; /* saw a newer grant: knows it is fenced */ if(g>n.rdG){ if(bv<n.cmax) n.bad=7; if(n.rdG&&bg<n.rdG&&(bg!=n.rdbg||bv!=n.rdbv)) n.bad=2; n.rdG=g;n.rdbg=bg;n.rdbv=bv; } }
static void confirm(S&n,int h){ Cl&x=n.cl[h]; if(x.kind==1){ readDone(n,x,x.g,x.bg,x.bv); x.rep=0; } else { int v=x.bv+1; if(n.cmask>>v&1) n.bad=3; if(n.rdG>x.g&&n.rdbv<v) n.bad=4; n.cmask|=1<<v; if(v>n.cmax) n.cmax=v; if(x.ops)x.ops--; } x.kind=0;x.bg=x.bv=0;x.i=0;x.pc=3; }
template<class E> void genClient(const S&s,int h,E emit){
  const Cl&x=s.cl[h]; bool dead=s.dead>>h&1;
  if(dead){ if(s.rejoins&&x.pc!=21){} return; }
  auto L=[&](int l){return l*4+h;};
  switch(x.pc){
  case 0: if(x.reqs){ S n=s; Cl&y=n.cl[h]; y.reqs--; y.rs++; y.ops=c.ops; n.rq[h].rs=y.rs; n.rq[h].want=1; n.rq[h].clean=0; y.pc=1; emit(n,L(L_REQ)); } break;
  case 1:
    if(D("check_before_grant_read")){ S n=s; n.cl[h].pc=11; n.cl[h].i=0; n.cl[h].tag=0; emit(n,L(L_CHKSEAT)); }
    else for(int k=0;k<c.K;k++) if(gmatch(s,k,h,x)){ const G&g=s.gr[GI(k)];
      // skip hopeless polls (tag below a visible claim: would only come back here)
      bool stale=false; for(int j=0;j<c.K;j++) if(s.seat[j]>g.tag) stale=true;
      if(stale && !D("accept_without_check") && !D("check_own_manager_only") && !D("manager_self_shortcut")) continue;
      S n=s; Cl&y=n.cl[h]; y.tag=g.tag;y.g=g.g;y.rep=g.rep;y.mk=k;y.i=0;y.pc=2;
      if(D("accept_without_check")||(D("manager_self_shortcut")&&k==h)) { accept(n,h); emit(n,L(L_ACC)); }
      else emit(n,L(L_POLL)); }
    if(s.cancels){ S n=s; n.cancels--; n.rq[h].want=0; n.rq[h].clean=D("cancel_counts_as_repaired")?1:0; n.cl[h].pc=0; resetCl(n.cl[h]); emit(n,L(L_CANCEL)); }
    if(fencedAny(s,h,x.inc)){ S n=s; resetCl(n.cl[h]); n.cl[h].pc=9; emit(n,L(L_NOTICE)); }
    break;
  case 11:{ if(seatBad(s,x.i)) break; S n=s; Cl&y=n.cl[h]; if(s.seat[x.i]>y.tag)y.tag=s.seat[x.i]; y.i++; if(y.i==c.K){y.i=0;y.pc=12;} emit(n,L(L_CHKSEAT)); break; }
  case 12:{ bool any=false; for(int k=0;k<c.K;k++) if(gmatch(s,k,h,x)&&s.gr[GI(k)].tag==x.tag){ S n=s; Cl&y=n.cl[h]; y.g=s.gr[GI(k)].g;y.rep=s.gr[GI(k)].rep;y.mk=k; accept(n,h); emit(n,L(L_ACC)); any=true; }
     if(!any){ S n=s; resetCl(n.cl[h]); n.cl[h].pc=1; emit(n,L(L_POLL)); } break; }
  case 2:{ S n=s; Cl&y=n.cl[h]; int k=D("check_own_manager_only")?x.mk:x.i; if(seatBad(s,k)) break;
     if(s.seat[k]>x.tag){ resetCl(y); y.pc=1; emit(n,L(L_CHKSEAT)); break; }
     y.i++; if(y.i==c.K||D("check_own_manager_only")){ accept(n,h); emit(n,L(L_ACC)); } else emit(n,L(L_CHKSEAT)); break; }
  case 3:
    if(x.rep||x.ops){ S n=s; Cl&y=n.cl[h]; y.i=0; y.bg=y.bv=0; if(c.B) y.pc=30; else { y.pc=4; if(D("check_then_write")) {y.kind=0;} if(D("no_seal")) y.rep=0; } emit(n,L(L_STARTOP)); }
    { bool canrel=!x.rep; if(c.sticky){ bool r=false; for(int k=0;k<c.K;k++){const G&g=s.gr[k]; if(g.h==h&&g.g==x.g&&g.rec)r=true;} canrel=canrel&&r; }
      if(canrel){ S n=s; n.rq[h].want=0; n.rq[h].clean=1; resetCl(n.cl[h]); n.cl[h].pc=0; n.cl[h].ops=0; emit(n,L(L_REL)); } }
    if(fencedAny(s,h,x.inc)){ S n=s; resetCl(n.cl[h]); n.cl[h].pc=9; emit(n,L(L_NOTICE)); }
    break;
  case 4:{ S n=s; Cl&y=n.cl[h]; const R&r=s.rec[x.i]; if(r.g>y.bg||(r.g==y.bg&&r.ver>y.bv)){y.bg=r.g;y.bv=r.ver;} y.i++;
     if(y.i==c.N){ y.i=0; if(!x.rep) readDone(n,y,y.g,y.bg,y.bv); 
       if(!y.rep && !y.ops) { y.pc=3; y.bg=y.bv=0; }
       else { y.kind=y.rep?1:2; y.pc=D("check_then_write")?7:(y.rep?5:6); } }
     emit(n,L(L_COL)); break; }
  case 5:{ S n=s; n.rec[h]={x.g,x.bv,x.inc}; n.cl[h].i=0; if(D("check_then_write")) confirm(n,h); else n.cl[h].pc=7; emit(n,L(L_SEAL)); break; }
  case 6:{ S n=s; n.rec[h]={x.g,(u8)(x.bv+1),x.inc}; n.cl[h].i=0; if(D("check_then_write")||D("no_fence_check")) confirm(n,h); else n.cl[h].pc=7; emit(n,L(L_WRITE)); break; }
  case 7:{ S n=s; Cl&y=n.cl[h]; int k=D("fence_row_of_granter_only")?x.mk:x.i;
     if(s.fen[k][h]>=x.inc){ resetCl(y); y.pc=9; emit(n,L(L_NOTICE)); break; }
     y.i++; if(y.i==c.K||D("fence_row_of_granter_only")){ y.i=0; if(D("check_then_write")) y.pc=x.kind==1?5:6; else confirm(n,h); emit(n,L(L_CONF)); } else emit(n,L(L_CHKFEN)); break; }
  case 9: if(s.rejoins){ S n=s; Cl&y=n.cl[h]; n.rejoins--; if(c.B){ n.intent[h]=0; } n.own[h]=0; y.inc=(maxfen(s,h)>y.inc?maxfen(s,h):y.inc)+1; y.rs=0; n.rq[h]={y.inc,0,0,0}; resetCl(y); y.pc=0; y.ops=0; if(!y.reqs) y.reqs=1; emit(n,L(L_REJOIN)); } break;
  // body B
  case 30:{ S n=s; Cl&y=n.cl[h]; int j=x.i; bool q=false; if(j!=h&&(c.clients>>j&1)&&!D("no_quarantine")){ int f=maxfen(s,j); bool unresolved=f>=s.rq[j].inc&&!(s.dead>>j&1); if(unresolved&&s.intent[j]) q=true; }
     if(q){ y.i=0; y.pc=3; y.rep=0; y.ops=0; emit(n,L(L_INTQ)); break; }
     y.i++; if(y.i==c.N){ y.i=0; y.pc=31; } emit(n,L(L_INTQ)); break; }
  case 31:{ S n=s; Cl&y=n.cl[h]; bool fr=s.ch==NOH; int o=s.ch; if(!fr){ if(s.rq[o].inc>s.cinc) fr=true; if(D("adopt_on_fence")&&maxfen(s,o)>=s.cinc) fr=true; if((s.dead>>o&1)&&maxfen(s,o)>=s.cinc) fr=true; }
     if(!fr){ y.pc=3; y.rep=0; y.ops=0; } else y.pc=D("no_intent")?33:(D("intent_after_check")?33:32); emit(n,L(L_RDC)); break; }
  case 32:{ S n=s; n.intent[h]=1; n.cl[h].i=0; n.cl[h].pc=(D("intent_after_check")||D("no_check_after_intent"))?34:33; emit(n,L(L_INT)); break; }
  case 33:{ S n=s; Cl&y=n.cl[h]; if(s.fen[x.i][h]>=x.inc){ resetCl(y); y.pc=9; emit(n,L(L_NOTICE)); break; } y.i++; if(y.i==c.K){ y.i=0; y.pc=D("intent_after_check")?32:34; } emit(n,L(L_CHKFEN)); break; }
  case 34:{ S n=s; n.ch=h;n.cinc=x.inc;n.cg=x.g; n.cl[h].pc=35; emit(n,L(L_WC)); break; }
  case 35:{ S n=s; if(!D("no_intent"))n.intent[h]=0; n.cl[h].pc=36; n.cl[h].i=0; emit(n,L(L_CLR)); break; }
  case 36:{ S n=s; Cl&y=n.cl[h]; if(!D("no_confirm_check")&&s.fen[x.i][h]>=x.inc){ resetCl(y); y.pc=9; emit(n,L(L_NOTICE)); break; } y.i++;
     if(y.i==c.K){ y.i=0; for(int j=0;j<c.N;j++) if(j!=h&&n.own[j]&&!(s.dead>>j&1)) n.bad=5; n.own[h]=x.inc; y.ops=0; y.rep=0; y.pc=3; emit(n,L(L_CONF)); } else emit(n,L(L_CHKFEN)); break; }
  }
}
template<class E> void genMgr(const S&s,int k,E emit){
  if(s.dead>>k&1) return; const Mg&m=s.mg[k]; auto L=[&](int l){return l*4+k;};
  auto after=[&](S&n){ Mg&y=n.mg[k]; y.free=n.gr[GI(k)].h==NOH?1:0; y.wh=y.winc=y.wrs=0; };
  switch(m.pc){
  // A seat that is not in charge writes its own line again: the epoch that its machine remembers, which is the one published or that of a claim that was not.
  case 0: if(seatBad(s,k)&&!D("heal.seats_claim_anew")){ S n=s; n.dseat&=~(1<<k); if(D("heal.seat_forgets")) n.seat[k]=0; emit(n,L(L_HEAL));
       int e=0; for(int j=0;j<c.K;j++) if(s.seat[j]>e) e=s.seat[j]; e++; while((e-1)%c.K!=k) e++; if(!D("heal.seat_forgets")&&s.claims){ S q=n; q.claims--; q.seat[k]=e; emit(q,L(L_HEAL)); } }
     if(s.claims){ S n=s; n.claims--; memset(&n.mg[k],0,sizeof(Mg)); n.mg[k].pc=1; emit(n,L(L_TO)); } break;
  case 1:{ S n=s; Mg&y=n.mg[k];
     // The own seat line does not verify: the tag of the own copies tells how high this seat ever served.
     if(seatBad(s,m.i)){ if(m.i!=k||grBad(s,k)) break; if(!D("heal.claim_ignores_tags")&&s.gr[k].tag>y.e) y.e=s.gr[k].tag; }
     else { if(s.seat[m.i]>y.e)y.e=s.seat[m.i]; if(m.i==k) y.wrs=s.seat[k]+1; } y.i++; if(y.i==c.K){ y.i=0; int e=y.e+1; if(!D("epochs_not_unique")) while((e-1)%c.K!=k) e++; y.e=e; y.pc=D("collect_before_claim")?4:2; if(D("collect_before_claim")) y.a.h=NOH; } emit(n,L(L_RDSEAT)); break; }
  case 2:{ S n=s; Mg&y=n.mg[k]; n.seat[k]=m.e; n.dseat&=~(1<<k); y.i=0; if(D("collect_before_claim")) y.pc=6; else { y.pc=4; y.a.h=NOH; if(D("no_collect")||D("shared_grant_line")&&0) y.pc=6; } emit(n,L(L_CLAIM)); break; }
  case 4:{ S n=s; Mg&y=n.mg[k]; G g=s.gr[m.i]; if(s.dgr>>m.i&1){ g=G{}; y.hid|=1<<m.i; } bool better=D("adopt_by_grant_number")?(g.g>y.a.g||(g.g==y.a.g&&false)):(g.tag>y.a.tag); if(g.tag&&better) y.a=g; y.i++; if(y.i==c.K){ y.i=0; y.pc=D("collect_before_claim")?2:y.hid?5:6; } emit(n,L(L_COLM)); break; }
  // A copy that does not verify cannot have a tag above its seat's epoch: fetched behind the copy. If that is above the best tag, collect again.
  case 5:{ S n=s; Mg&y=n.mg[k]; int j=0; while(!(m.hid>>j&1)) j++; if(seatBad(s,j)) break;
     // Of the own seat the epoch before this claim counts (wrs - 1; 0 = not read).
     bool may=j==k?!m.wrs||m.wrs-1>m.a.tag:s.seat[j]>m.a.tag;
     if(may&&!D("heal.adopt_best_readable")){ y.hid=0; y.i=0; y.a=G{}; y.a.h=NOH; y.pc=4; emit(n,L(L_HIDDEN)); break; }
     y.hid&=~(1<<j); if(!y.hid) y.pc=6; emit(n,L(L_HIDDEN)); break; }
  case 6:{ S n=s; Mg&y=n.mg[k]; G a=m.a; a.tag=m.e; n.gr[GI(k)]=a; n.dgr&=~(1<<GI(k)); y.a=G{}; y.pc=7; after(n); emit(n,L(L_ADOPT)); break; }
  case 7:{
    if(seatBad(s,k)){ S n=s; n.dseat&=~(1<<k); if(s.seat[k]<m.e) n.seat[k]=m.e; emit(n,L(L_HEAL)); }
    if(grBad(s,k)){ S n=s; n.dgr&=~(1<<GI(k)); emit(n,L(L_HEAL)); break; }
    int gi=GI(k); const G&a=D("shared_grant_line")?s.gr[0]:s.gr[k];
    if(m.late){ S n=s; n.fen[k][m.late>>4]=m.late&15; n.mg[k].late=0; emit(n,L(L_SUSP)); return; }
    if(!m.free&&a.h!=NOH){
      const Q&q=s.rq[a.h]; int f=0;
      if(!D("no_incarnation")&&q.inc>a.inc) f=2;
      else if(D("no_reqno")){ if(!q.want) f=(a.rep&&!q.clean)?2:1; }
      else if((D("no_incarnation")||q.inc==a.inc)&&q.rs>a.rs) f=a.rep?2:1;
      else if(q.rs==a.rs&&!q.want) f=(a.rep&&!q.clean)?2:1;
      if(f){ S n=s; n.mg[k].free=f; emit(n,L(L_SCANH)); }
      bool fz=fencedAny(s,a.h,a.inc);
      if(!fz&&s.fences){ S n=s; n.fences--; if(D("grant_before_fence")&&!c.S){ n.mg[k].late=0; n.mg[k].free=3; } else { n.fen[k][a.h]=a.inc; if(!c.S) n.mg[k].free=2; } emit(n,L(L_SUSP)); }
      if(fz&&!c.S){ S n=s; n.mg[k].free=2; emit(n,L(L_SEEF)); }
      if(c.S&&fz&&((s.dead>>a.h&1)||D("suspicion_is_proof"))){ S n=s; n.mg[k].free=2; emit(n,L(L_PROOF)); }
      if(c.sticky&&!a.rec&&!D("_no_recall")) for(int h=0;h<c.N;h++) if(h!=a.h&&(c.clients>>h&1)&&s.rq[h].want){ S n=s; n.gr[gi].rec=1; emit(n,L(L_RECALL)); break; }
    }
    if(m.free) for(int h=0;h<c.N;h++) if(c.clients>>h&1){ const Q&q=s.rq[h]; if(q.want&&!(a.h==h&&a.inc==q.inc&&a.rs==q.rs&&!(D("no_reqno")))&&!(fencedAny(s,h,q.inc))){ S n=s; Mg&y=n.mg[k]; y.wh=h;y.winc=q.inc;y.wrs=q.rs;y.pc=8; emit(n,L(L_SCANW)); } }
    bool sd=false; for(int j=0;j<c.K;j++) if(!seatBad(s,j)&&s.seat[j]>m.e) sd=true;
    if(sd&&!D("shared_grant_line")){ S n=s; memset(&n.mg[k],0,sizeof(Mg)); emit(n,L(L_STEP)); }
    break; }
  case 8:{ S n=s; Mg&y=n.mg[k]; n.dgr&=~(1<<GI(k)); G&g=n.gr[GI(k)]; u8 oh=g.h,oi=g.inc; u8 rep=m.free>=2; 
     u8 base=g.g; g.tag=m.e; g.g=base+1; g.h=m.wh; g.inc=m.winc; g.rs=m.wrs; g.rep=rep; g.rec=0; if(m.free==3) y.late=oh<<4|oi; y.free=0; y.wh=y.winc=y.wrs=0; y.pc=7; emit(n,L(L_GRANT)); break; }
  }
}
template<class E> void genEnv(const S&s,E emit){
  if(s.dmg) for(int k=0;k<c.K;k++){ if(!seatBad(s,k)){ S n=s; n.dmg--; n.dseat|=1<<k; emit(n,L_DAMAGE*4+k); } if(!grBad(s,k)){ S n=s; n.dmg--; n.dgr|=1<<k; emit(n,L_DAMAGE*4+k); } }
  for(int h=0;h<c.N;h++){
    bool dead=s.dead>>h&1;
    if(!dead&&s.crashes){ S n=s; n.crashes--; n.dead|=1<<h; memset(&n.mg[h],0,sizeof(Mg)); Cl&y=n.cl[h]; u8 inc=y.inc,reqs=y.reqs; memset(&y,0,sizeof y); y.inc=inc; y.reqs=reqs; n.own[h]=0; emit(n,L_CRASH*4+h); }
    if(dead&&s.rejoins&&!(D("no_reboot"))){ S n=s; n.rejoins--; n.dead&=~(1<<h); Cl&y=n.cl[h]; y.inc=(maxfen(s,h)>y.inc?maxfen(s,h):y.inc)+1; if(!y.reqs) y.reqs=1; y.pc=0; n.intent[h]=0; if(c.clients>>h&1) n.rq[h]={y.inc,0,0,0}; if(D("restart_clears_seat_rows")&&h<c.K){ n.gr[h]=G{}; n.gr[h].h=NOH; } emit(n,L_REBOOT*4+h); }
  }
}
template<class E> void genReader(const S&s,E emit){
  if(!s.reads) return; S n=s; auto done=[&](bool ok){ if(ok&&s.rg){ if(n.rdG>s.rg&&n.rdbv<s.rv) n.bad=8; if(s.rv>n.cmax) n.cmax=s.rv; } n.reads--; n.rpc=n.ri=n.rg=n.rv=n.rw=n.rinc=0; };
  if(s.rpc==0){ const R&r=s.rec[s.ri]; if(r.g>s.rg||(r.g==s.rg&&r.ver>s.rv)){n.rg=r.g;n.rv=r.ver;n.rw=s.ri;n.rinc=r.inc;} n.ri++; if(n.ri==c.N){ n.ri=0; n.rpc=1; S q=n; if(!q.rg||D("reader_no_fence_check")){ u8 g=n.rg,v=n.rv; if(n.rg){ if(n.rdG>g&&n.rdbv<v) n.bad=8; if(v>n.cmax)n.cmax=v; } n.reads--; n.rpc=n.ri=n.rg=n.rv=n.rw=n.rinc=0; } } }
  else { if(s.fen[s.ri][s.rw]>=s.rinc) done(false); else { n.ri++; if(n.ri==c.K) done(true); } }
  emit(n,L_READER*4); }
static S initS(){ S s; memset(&s,0,sizeof s); for(int k=0;k<3;k++) s.gr[k].h=NOH; s.ch=NOH; for(int h=0;h<3;h++){ if(c.clients>>h&1){ s.cl[h].inc=1; s.rq[h].inc=1; s.cl[h].reqs=c.reqs; } else s.cl[h].inc=1; }
  s.claims=c.claims;s.fences=c.fences;s.crashes=c.crashes;s.rejoins=c.rejoins;s.cancels=c.cancels; s.reads=c.reads; s.dmg=c.dmg;
  if(c.old){ s.seat[0]=5; s.gr[0].tag=5; s.seat[1]=2; s.gr[1].tag=2; }   // seat 0 was started again and again while seat 1 stood by
  return s; }
// progress: from state s, no more crashes, suspicion only of really dead hosts, every other host scheduled fairly: every live waiter is served
static bool progress(S s){
  s.crashes=0; s.cancels=0; s.dmg=0; u8 need=0; for(int h=0;h<c.N;h++) if((c.clients>>h&1)&&!(s.dead>>h&1)&&(s.cl[h].pc==1||s.cl[h].pc==2||s.cl[h].pc==9)) need|=1<<h;
  bool seatAlive=false; for(int k=0;k<c.K;k++) if(!(s.dead>>k&1)) seatAlive=true; if(!seatAlive) return true;
  unsigned rot=0; int idle=0;
  for(int step=0;step<3000&&need;step++){
    bool moved=false; int mx=0; for(int k=0;k<c.K;k++) if(s.seat[k]>mx)mx=s.seat[k];
    for(int p=0;p<c.N*2&&need;p++){
      std::vector<std::pair<S,int>> v; int h=p/2; 
      s.rejoins=9; s.fences=0; s.claims=0; s.bad=0;
      if(p&1){ if(h<c.K){ bool act=false; for(int k=0;k<c.K;k++) if(!(s.dead>>k&1)&&s.mg[k].pc) { act=true; }
                bool topAct=false; for(int k=0;k<c.K;k++) if(!(s.dead>>k&1)&&s.mg[k].pc>=1&&(s.mg[k].pc<=1||s.mg[k].e>=mx)) topAct=true;
                if((!topAct||!act)&&!D("_no_takeover")) s.claims=1; 
                const G&a=s.gr[GI(h)]; if(s.mg[h].pc==7&&a.h!=NOH&&(s.dead>>a.h&1)&&!D("_no_suspicion")) s.fences=1;
                genMgr(s,h,[&](const S&n,int l){v.push_back({n,l});}); } }
      else if(c.clients>>h&1) genClient(s,h,[&](const S&n,int l){ if(l/4==L_CANCEL) return; v.push_back({n,l});});
      if(v.empty()) continue; size_t pick=rot++%v.size();
      if(!(p&1)) { for(size_t q=0;q<v.size();q++) if(v[q].second/4==L_STARTOP) pick=q; }
      S before=s; s=v[pick].first; moved=true;
      if(s.cl[h].pc==3&&!(p&1)) need&=~(1<<h); if(!(p&1)&&s.cl[h].pc==0) need&=~(1<<h);
    }
    if(!moved){ if(++idle>3) break; }
  }
  return need==0;
}
int main(int n,char**v){
  size_t cap=12000000; int prog=0; const char*name="run";
  for(int i=1;i<n;i++){ std::string a=v[i]; auto e=a.find('='); std::string k=a.substr(0,e); int x=e==std::string::npos?1:atoi(a.c_str()+e+1);
    if(k=="K")c.K=x;else if(k=="N")c.N=x;else if(k=="clients")c.clients=x;else if(k=="S")c.S=x;else if(k=="B")c.B=x;else if(k=="claims")c.claims=x;else if(k=="fences")c.fences=x;else if(k=="crashes")c.crashes=x;
    else if(k=="rejoins")c.rejoins=x;else if(k=="reqs")c.reqs=x;else if(k=="ops")c.ops=x;else if(k=="cancels")c.cancels=x;else if(k=="sticky")c.sticky=x;else if(k=="reads")c.reads=x;else if(k=="dmg")c.dmg=x;else if(k=="old")c.old=x; else if(k=="cap")cap=x*1000000ull;else if(k=="prog")prog=x;
    else if(k=="drop")c.d[a.substr(e+1)]=1; else {fprintf(stderr,"? %s\n",v[i]);return 2;} }
  auto t0=std::chrono::steady_clock::now(); Explorer<S> X; std::vector<long> cnt(L_NL,0);
  int b=X.run(initS(),[&](const S&s,auto emit){ auto e2=[&](const S&n,int l){cnt[l/4]++;emit(n,l);}; for(int h=0;h<c.N;h++) if(c.clients>>h&1) genClient(s,h,e2); for(int k=0;k<c.K;k++) genMgr(s,k,e2); genEnv(s,e2); genReader(s,e2); },badOf,cap);
  double t=std::chrono::duration<double>(std::chrono::steady_clock::now()-t0).count();
  printf("%s states=%zu edges=%zu %.1fs%s  ",b?"VIOLATION":"ok",X.st.size(),X.edges,t,X.capped?" CAPPED":"");
  if(b){ auto tr=X.trace(X.badAt); printf("[%s] in %zu steps\n   ",badName(b),tr.size()); for(int l:tr) printf("%s(%d); ",LN[l/4],l%4); printf("\n"); return 1; }
  printf("confirmed=%ld accepts=%ld seals=%ld adopts=%ld\n",cnt[L_CONF],cnt[L_ACC],cnt[L_SEAL],cnt[L_ADOPT]);
  if(prog){ size_t ck=0; for(size_t i=0;i<X.st.size();i+=prog){ ck++; if(!progress(X.st[i])){ auto tr=X.trace(i); printf("NO PROGRESS from state %zu: ",i); for(int l:tr) printf("%s(%d); ",LN[l/4],l%4); printf("\n"); return 1; } } printf("   progress checked from %zu states: all live waiters served\n",ck); }
  return 0; }
