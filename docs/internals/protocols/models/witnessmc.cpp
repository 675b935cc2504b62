// SPDX-License-Identifier: Apache-2.0
// WITNESS (LOCKS.md 12.19): one slot; joiners p0, p1, p2 of up to three machines; marks with kernels; an observer that states ends; joiners
// that vouch for a free slot. The binding register is decided (joinmc.cpp is about that); here it is one atomic line.
// Parameters: shape=shared|twins|three|nodes (machines of p0 p1 p2: 2 2 3 / 2 2 3 with a state directory each / 2 3 4 / shared, p1 by another inode), kernels=N (1 = all on the
// observer's, 2 = the last machine on another), crashes=N, rejoins=N, fences=N, drop=RULE.
#include "mc.h"
#include <set>
#include <map>
enum{ATTACH=12};
struct Bd{u8 inc,m,n;}; struct Bx{u8 m,n,prev,v;};
struct J{u8 pc,gen,inc,prev,on,mk,v,ot,oi;};
struct S{Bd bd; Bx bx; u8 im,ii,in,iw; u8 wm,wi; u8 rm,ri,rk; J j[3]; u8 lk; u8 fen,dead; u8 opc,om,oi; u8 crashes,rejoins,fences; };
static std::set<std::string> d; static bool D(const char*s){return d.count(s);} static int MACH[3]={2,2,3}; static bool own_state=false; static int kernels=1;
static int mach(int j){return MACH[j];} static int lockof(int j){return own_state?j:mach(j);} static int nonce(const J&x,int j){return 1+j*8+x.gen;}
static int kernel(int m){ return kernels==2 && m==MACH[2] ? 2 : 1; }
// shape=nodes: p1 reaches the pool by another inode than its sibling p0, under the same kernel and over the same caches.
static bool nodes=false; static int inode(int j){ return nodes&&j==1 ? 9 : kernel(mach(j)); }
// Whether any process but `except` is marked as machine m's with kernel k.
static bool marked(const S&s,int m,int k,int except){ if(k!=kernel(m)) return false; for(int j=0;j<3;j++) if(j!=except&&s.j[j].mk&&mach(j)==m&&inode(j)==k) return true; return false; }
// Whether no process but j shares its lock: one that is live, or attaching.
static bool alone(const S&s,int j){ for(int o=0;o<3;o++) if(o!=j&&lockof(o)==lockof(j)&&(s.j[o].pc==8||s.j[o].pc==ATTACH||s.j[o].pc==13||s.j[o].pc==15)) return false; return true; }
enum{LLOCK,LMARK,LPREV,LVOUCH,LFLUSH,LBOX,LSEE,LLINE,LID,LATT,LATTM,LATTL,LCRASH,LAGAIN,LBIND,LFEN,LREAD,LASK,LOUT,LDEAD,LBACK,LACK};
static const char*LN[]={"J1 lock","mark alone","read binding and ID","ask the kernel","flush, will vouch","publish JOINBOX","sees binding","publish a slot line","publish ID","attach: lock shared","attach: mark","attach: live","CRASH","start again","BIND","fence","observer reads ID","observer asks the kernel","observer flushes","DEAD","a line is written back from the caches","fenced: joins again"};
// pc: 0 idle, 1 locked, 2 marked, 3 binding read, 4 vouch asked, 5 box published, 6 bound, 7 line written, 8 live, 9 gone, 12 attaching, 13 attached and marked
template<class E> void gen(const S&s,E emit){
 for(int j=0;j<3;j++){ const J&x=s.j[j]; int m=mach(j),k=kernel(m); auto L=[&](int l){return l*4+j;}; S n=s; J&y=n.j[j];
  switch(x.pc){
  case 0: if(!(s.lk>>lockof(j)&1)){ n.lk|=1<<lockof(j); y.pc=1; emit(n,L(LLOCK)); }
    else for(int o=0;o<3;o++) if(o!=j&&lockof(o)==lockof(j)&&s.j[o].pc==8){ y.pc=ATTACH; y.inc=s.j[o].inc; emit(n,L(LATT)); } break;
  case ATTACH: y.mk=1; y.pc=13; emit(n,L(LATTM)); break;
  case 13: if(s.iw!=inode(j)){ if(s.ii==x.inc&&s.im==m){ if(!D("not_retired")) n.iw=0; y.pc=15; emit(n,L(LATTM)); } break; }
    if(marked(s,m,k,j)||D("gap_between_marks")) { y.pc=8; emit(n,L(LATTL)); } else { y=J{}; y.gen=x.gen; if(alone(s,j)) n.lk&=~(1<<lockof(j)); emit(n,L(LATTL)); } break;
  case 15: { bool alive=false; for(int o=0;o<3;o++) if(o!=j&&lockof(o)==lockof(j)&&s.j[o].pc==8) alive=true;
    if(alive){ y.pc=8; } else { y=J{}; y.gen=x.gen; y.pc=9; if(alone(s,j)) n.lk&=~(1<<lockof(j)); } emit(n,L(LATTL)); break; }
  case 1: if(!marked(s,m,k,j)||D("twin_joins")){ y.mk=1; y.pc=2; emit(n,L(LMARK)); } break;
  case 2: y.prev=s.bd.n; y.ot=s.bd.m; y.oi=s.bd.inc; y.pc=3; y.on=D("nonce_not_compared")?(s.ii>0):(s.in==s.bd.n&&s.ii==s.bd.inc&&s.ii>0);
    y.ot=s.im; if(!(D("kernel_not_compared")||s.iw==inode(j))) y.on=0; emit(n,L(LPREV)); break;
  case 3: { S q=s; q.j[j].v=0; q.j[j].pc=5; q.bx={(u8)m,(u8)nonce(x,j),x.prev,0}; q.j[j].ot=q.j[j].oi=q.j[j].on=0; emit(q,L(LBOX));
    if(x.on&&x.ot!=m&&!marked(s,x.ot,inode(j),-1)){ y.pc=16; emit(n,L(LVOUCH)); } break; }
  case 16: y.pc=D("not_read_again")||D("kernel_not_compared")||s.iw==inode(j)?4:2; emit(n,L(LPREV)); break;
  case 4: if(!D("unflushed")&&s.rk==k){ n.wm=s.rm;n.wi=s.ri;n.rm=n.ri=n.rk=0; } y.v=1; y.pc=14; emit(n,L(LFLUSH)); break;
  case 14: n.bx={(u8)m,(u8)nonce(x,j),x.prev,1}; y.pc=5; y.ot=y.oi=y.on=y.v=0; emit(n,L(LBOX)); break;
  case 5: if(s.bd.m==m&&s.bd.n==nonce(x,j)){ y.pc=6; y.inc=s.bd.inc; y.prev=0; emit(n,L(LSEE)); } else if(s.rejoins){ n.rejoins--; y.pc=2; emit(n,L(LAGAIN)); } break;
  case 6: // a machine that comes back brings out what it left, known to its segment or not
    if(s.rk==k&&s.rm==m&&!D("own_unflushed")){ n.wm=s.rm;n.wi=s.ri;n.rm=n.ri=n.rk=0; } n.wm=m;n.wi=x.inc; y.pc=7; emit(n,L(LLINE)); break;
  case 7: n.im=m;n.ii=x.inc;n.in=nonce(x,j);n.iw=inode(j); y.pc=8; emit(n,L(LID)); break;
  }
  if(s.crashes&&x.pc&&x.pc!=9){ S q=s; q.crashes--; bool last=alone(s,j);
    q.j[j]=J{}; q.j[j].gen=x.gen; q.j[j].pc=9; if(last) q.lk&=~(1<<lockof(j)); emit(q,L(LCRASH));
    if(x.pc==8&&!s.rk){ q.rm=m;q.ri=x.inc;q.rk=k; emit(q,L(LCRASH)); } }
  if(x.pc==9&&s.rejoins&&x.gen<3){ S q=s; q.rejoins--; q.j[j].pc=0; q.j[j].gen++; emit(q,L(LAGAIN)); } }
 S n=s;
 if(s.rk){ n.wm=s.rm;n.wi=s.ri;n.rm=n.ri=n.rk=0; emit(n,LBACK*4); n=s; }
 // The manager: binds a box whose asker names the bound nonce.
 if(s.bx.m&&s.bx.n!=s.bd.n&&s.bx.prev==s.bd.n&&s.bd.inc<6){ bool ok=!s.bd.m||s.bx.m==s.bd.m||s.bx.v||s.dead>=s.bd.inc;
   if(ok){ u8 inc=s.bd.inc; if(s.fen>inc)inc=s.fen; if(s.dead>inc)inc=s.dead; n.bd={(u8)(inc+1),s.bx.m,s.bx.n}; emit(n,LBIND*4); n=s; } }
 if(s.fences&&s.bd.inc&&s.fen<s.bd.inc){ n.fences--; n.fen=s.bd.inc; emit(n,LFEN*4); n=s; }
 // The observer, under kernel 1.
 switch(s.opc){
 case 0: if(D("asked_before_read")&&s.im&&!marked(s,s.im,1,-1)){ n.opc=4; n.om=s.im; emit(n,LASK*4+3); n=s; break; }
   if(s.ii&&s.ii>s.dead&&(s.fen>=s.ii||D("not_fenced_first"))&&(s.iw==1||D("kernel_not_compared"))){ n.opc=1;n.om=s.im;n.oi=s.ii; emit(n,LREAD*4+3); n=s; } break;
 case 4: if(s.ii&&s.im==s.om&&s.ii>s.dead){ n.opc=2; n.oi=s.ii; } else n.opc=0,n.om=0; emit(n,LREAD*4+3); n=s; break;
 case 1: if(!marked(s,s.om,1,-1)){ n.opc=5; } else { n.opc=n.om=n.oi=0; } emit(n,LASK*4+3); n=s; break;
 case 5: if(D("not_read_again")||D("kernel_not_compared")||(s.iw==1&&s.ii==s.oi)) n.opc=2; else n.opc=n.om=n.oi=0; emit(n,LREAD*4+3); n=s; break;
 case 2: if(s.rk==1&&!D("unflushed")){ n.wm=s.rm;n.wi=s.ri;n.rm=n.ri=n.rk=0; } n.opc=3; emit(n,LOUT*4+3); n=s; break;
 case 3: if(s.oi>n.fen) n.fen=s.oi; if(s.oi>n.dead) n.dead=s.oi; n.opc=n.om=n.oi=0; emit(n,LDEAD*4+3); n=s; break; } }
int main(int c,char**v){ size_t cap=60000000; S s; memset(&s,0,sizeof s); s.crashes=1;s.rejoins=1;s.fences=1;
 for(int i=1;i<c;i++){ std::string a=v[i]; auto e=a.find('='); std::string k=a.substr(0,e),w=a.substr(e+1); int x=atoi(w.c_str());
  if(k=="drop")d.insert(w); else if(k=="crashes")s.crashes=x; else if(k=="rejoins")s.rejoins=x; else if(k=="fences")s.fences=x; else if(k=="kernels")kernels=x; else if(k=="cap")cap=x*1000000ul;
  else if(k=="shape"){ if(w=="twins")own_state=true; else if(w=="three"){MACH[1]=3;MACH[2]=4;} else if(w=="nodes") nodes=true; else if(w!="shared") return 2; } else return 2; }
 Explorer<S> X; auto bad=[&](const S&t){
  for(int j=0;j<3;j++) for(int o=0;o<3;o++) if(o!=j&&t.j[j].pc>=6&&t.j[j].pc<=8&&t.j[o].pc>=6&&t.j[o].pc<=8&&(mach(j)!=mach(o)||t.j[j].inc!=t.j[o].inc)) return 1;
  for(int j=0;j<3;j++) if(t.j[j].pc>=6&&t.j[j].pc<=8){ if(t.dead>=t.j[j].inc) return 2; if(t.bd.inc>t.j[j].inc) return 3; if(t.j[j].pc==8&&(t.wm!=mach(j)||t.wi!=t.j[j].inc)) return 4; }
  return 0; };
 int b=X.run(s,[&](const S&t,auto e){gen(t,e);},bad,cap); std::vector<long> cnt(32); for(auto&l:X.lab) cnt[l/4]++;
 const char*what[]={"ok","VIOLATION two live owners of one slot","VIOLATION a living incarnation is stated dead","VIOLATION slot bound anew while its incarnation lives","VIOLATION a line of a former owner came back"};
 printf("witness %s states=%zu edges=%zu%s vouched=%ld stated=%ld attached=%ld\n",what[b],X.st.size(),X.edges,X.capped?" CAPPED":"",cnt[LFLUSH],cnt[LDEAD],cnt[LATTL]);
 if(b){ auto t=X.trace(X.badAt); printf("   %zu steps: ",t.size()); for(int l:t) printf("%s(%d); ",LN[l/4],l%4); puts(""); } }
